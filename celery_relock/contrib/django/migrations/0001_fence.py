"""The table that `self.lock.fenced(connection)` needs. It has no model: nobody else reads it."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from celery_relock.contrib.sql import DIALECTS, TABLE, create_table


def _make(apps: Any, schema_editor: Any) -> None:
    # With another database there is no fence, and the rest of the app works.
    if schema_editor.connection.vendor in DIALECTS:
        schema_editor.execute(create_table(schema_editor.connection.vendor))


def _drop(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor in DIALECTS:
        schema_editor.execute(f"DROP TABLE {TABLE}")


class Migration(migrations.Migration):  # type: ignore[misc]  # Django ships no types
    initial = True
    # One statement is atomic by itself, and MySQL commits implicitly before and after it.
    operations = [migrations.RunPython(_make, _drop, atomic=False)]  # noqa: RUF012
