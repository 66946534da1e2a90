"""The configuration of the Django app: its names, its check, and the Celery app whose locks it
shows."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig

from ...errors import LockConfigError


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

    def check_app(self) -> None:
        """Say it if no app of the project was imported: Celery's own has none of its settings.

        Raises:
            LockConfigError: that is so. What else is wrong is told when the app is used.
        """
        from ...declaration import engine_of

        try:
            engine_of(self.celery)
        except LockConfigError:
            if self.celery.main == "default":
                raise LockConfigError(
                    "no Celery app had been imported when Django was set up, so the settings of "
                    "the locks are not known: import it in the project's __init__.py (from .celery "
                    "import app as celery_app), as Celery's guide for Django says"
                ) from None


def _forget_settings(**_: Any) -> None:
    from ...declaration import forget_settings

    forget_settings()
