"""What a campaign tells its workers, and the app that it shares with them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from celery import Celery

# Who sends gives each message its execution: else copies of one could not be told from two.
from celery_relock import LockedTask  # noqa: F401

VARIABLE = "RELOCK_CHAOS_PARKED"
TASK = "chaos.touch"


@dataclass(frozen=True)
class Settings:
    """Three servers, so that each can be cut off by itself.

    Attributes:
        broker, transport: the broker's URL and Celery's options for it.
        locks: Redis URL; the results are with the locks.
        resource: Redis URL of the register and of the journal, which nothing happens to.
        late: whether messages are acknowledged after their run.
        lease: seconds.
    """

    broker: str
    transport: dict[str, Any]
    locks: str
    resource: str
    namespace: str
    late: bool
    lease: float

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(**json.loads(os.environ[VARIABLE]))

    def app(self) -> Celery:
        """The app, without its task: enough to send."""
        app = Celery("chaos-parked")
        app.conf.update(
            broker_url=self.broker,
            broker_transport_options=self.transport,
            broker_connection_retry_on_startup=True,
            broker_connection_max_retries=None,
            result_backend=self.locks,
            # Else Celery makes a failure of a task that has ended while its connection was cut.
            result_backend_always_retry=True,
            task_acks_late=self.late,
            task_reject_on_worker_lost=self.late,
            task_default_queue=f"queue-{self.namespace}",
            worker_prefetch_multiplier=1,
            worker_hijack_root_logger=False,
            relock_url=self.locks,
            relock_namespace=self.namespace,
            relock_ttl=self.lease,
        )
        return app
