"""A task that an app gets to know only when its `include=` is imported."""

from __future__ import annotations

from celery import shared_task

from celery_relock import LockedTask


@shared_task(base=LockedTask, lock_key="{key}", name="late.work")
def work(key):
    """Is never called."""
