"""The configuration of the Django app: its names, its check, and the Celery app whose locks it
shows."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig


class RelockConfig(AppConfig):  # type: ignore[misc]  # Django ships no types
    """The configuration of the Django app.

    Attributes:
        celery (celery.Celery): the Celery app that was current when Django was set up.
    """

    name = "celery_relock.contrib.django"
    label = "celery_relock"
    verbose_name = "Locks"
    default_auto_field = "django.db.models.BigAutoField"
    celery: Any = None

    def ready(self) -> None:
        from celery import current_app
        from django.core.signals import setting_changed

        from . import checks  # noqa: F401  # registers itself

        # Now, in the main thread: in another one the current app is Celery's default.
        self.celery = current_app._get_current_object()
        setting_changed.connect(_forget_settings)  # sent by tests alone


def _forget_settings(**_: Any) -> None:
    from ...declaration import forget_settings

    forget_settings()
