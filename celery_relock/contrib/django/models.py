"""What the admin shows. There is no table: locks are in Redis."""

from __future__ import annotations

from django.db import models


class _Nothing(models.Manager):  # type: ignore[misc]  # Django ships no types
    """What reads every model, such as `manage.py dumpdata`, would ask for the table."""

    def get_queryset(self) -> models.QuerySet:
        return super().get_queryset().none()


class Lock(models.Model):  # type: ignore[misc]  # Django ships no types
    """A lock, for Django's admin and its permissions."""

    objects = _Nothing()

    class Meta:
        managed = False
        base_manager_name = "objects"
        default_permissions = ("view",)
        permissions = (("free_lock", "Can release locks and cancel parked tasks"),)
        verbose_name = "lock"
