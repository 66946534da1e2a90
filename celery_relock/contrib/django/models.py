"""What the admin shows. There is no table: locks are in Redis."""

from __future__ import annotations

from django.db import models


class Lock(models.Model):  # type: ignore[misc]  # Django ships no types
    """A lock, for Django's admin and its permissions."""

    class Meta:
        managed = False
        default_permissions = ("view",)
        permissions = (("free_lock", "Can release locks and cancel parked tasks"),)
        verbose_name = "lock"
