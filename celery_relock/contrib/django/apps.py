"""The app's name and label."""

from __future__ import annotations

from django.apps import AppConfig


class RelockConfig(AppConfig):  # type: ignore[misc]  # Django ships no types
    name = "celery_relock.contrib.django"
    label = "celery_relock"
    verbose_name = "Locks"
