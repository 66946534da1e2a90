"""Tasks in a process that can reach no broker."""

from __future__ import annotations

from typing import Any

from celery_relock import LockedTask


class WithoutABroker(LockedTask):
    """From before its body until its lock is released, this process can send nothing."""

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self._point_to("redis://127.0.0.1:1/0")

    def after_return(self, *_: Any) -> None:
        self._point_to(self.app.conf.broker_url)

    def _point_to(self, url: str) -> None:
        self.app.conf.broker_write_url = url
        self.app._pool = None
        self.app.amqp._producer_pool = None
