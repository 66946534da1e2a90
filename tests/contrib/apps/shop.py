"""A Django project with fenced writes: `python -m tests.contrib.apps.shop DATABASES [CODE]` tells
what happened at each database, and what the code's `charge` wrote. A process of its own, as Django
can be set up once in a process.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import django
import pymysql
from django.conf import settings
from django.core.management import call_command

from celery_relock import Lock
from celery_relock.contrib.sql import fence
from celery_relock.errors import LockConfigError, LockLost


def write(alias: str, token: int, amount: int) -> None:
    from django.db import connections, transaction

    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("INSERT INTO payments VALUES (%s)", [amount])
        fence(connections[alias], "account:42", token)


def write_and_roll_back(alias: str, amount: int) -> None:
    from django.db import connections, transaction

    connection, lock = connections[alias], Lock("memory://", "account:7")
    with lock, transaction.atomic(using=alias), lock.fenced(connection):
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO payments VALUES (%s)", [amount])
        transaction.set_rollback(True, using=alias)


def payments(alias: str) -> list[int]:
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT amount FROM payments")
        return [amount for (amount,) in cursor.fetchall()]


def happens(alias: str) -> dict[str, Any]:
    from django.db import connections

    call_command("migrate", database=alias, verbosity=0)
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE TABLE payments (amount integer)")
    write(alias, 2, 20)
    found: dict[str, Any] = {}
    try:
        write(alias, 1, 10)
    except LockLost:
        found["an older token"] = "LockLost"
    try:
        fence(connections[alias], "account:42", 2)
    except LockConfigError:
        found["outside of atomic"] = "LockConfigError"
    write_and_roll_back(alias, 30)
    found["payments"] = payments(alias)
    if sys.argv[2:]:
        names: dict[str, Any] = {}
        exec(sys.argv[2], names)
        names["charge"](42, 7)
        found["charged"] = payments(alias)[1:]
    call_command("migrate", "celery_relock", "zero", database=alias, verbosity=0)
    found["tables"] = connections[alias].introspection.table_names()
    connections[alias].close()
    return found


if __name__ == "__main__":
    pymysql.install_as_MySQLdb()
    databases = json.loads(sys.argv[1])
    settings.configure(
        DATABASES=databases, INSTALLED_APPS=["celery_relock.contrib.django"], USE_TZ=True
    )
    django.setup()
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
    print(json.dumps({alias: happens(alias) for alias in databases}))
