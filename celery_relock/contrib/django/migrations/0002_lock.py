"""The permissions of the admin's page. The model has no table."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]  # Django ships no types
    dependencies = [("celery_relock", "0001_fence")]  # noqa: RUF012
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            "Lock",
            [("id", models.BigAutoField(primary_key=True))],
            {
                "managed": False,
                "base_manager_name": "objects",
                "default_permissions": ("view",),
                "permissions": (("free_lock", "Can release locks and cancel parked tasks"),),
                "verbose_name": "lock",
            },
        )
    ]
