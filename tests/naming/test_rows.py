"""Rows of Django as arguments: their text is what a project makes of it, and is no name."""

from __future__ import annotations

import pytest

from tests.support.programs import said_by

pytest.importorskip("django", reason="Django is not installed")

CODE = """
import django
from celery import Celery
from django.conf import settings
from django.db import connection, models
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy

from celery_relock import LockedTask
from celery_relock.errors import LockConfigError

settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
)
django.setup()
app = Celery("shop", broker="memory://")
app.conf.relock_url = "memory://"

class State(models.TextChoices):
    NEW = "new", "brand new"

class Order(models.Model):
    state = models.CharField(max_length=10, default=State.NEW)

    class Meta:
        app_label = "shop"

    def __str__(self):
        return self.state

class Rush(Order):
    class Meta:
        app_label = "shop"
        proxy = True

with connection.schema_editor() as editor:
    editor.create_model(Order)
order = Order.objects.create()

@app.task(base=LockedTask)
def by_all(value): ...

@app.task(base=LockedTask, lock_key="order:{value}")
def by_text(value): ...

@app.task(base=LockedTask, lock_key="order:{value.pk}")
def by_key(value): ...

def name(task, value):
    try:
        print(task.lock_for(value).name)
    except LockConfigError as error:
        print("{order.pk}" in str(error))
"""


def test_the_text_of_a_row_is_no_lock_name_and_its_key_is_named_instead() -> None:
    asked = """
lazy = SimpleLazyObject(lambda: order)
queries = Order.objects.all(), Order.objects.raw("select * from shop_order")
for value in (order, Order(), Rush.objects.get(), lazy, *queries, [order]):
    name(by_text, value)
    name(by_all, value)
name(by_key, order)
"""
    assert said_by(CODE + asked).splitlines() == ["True"] * 14 + ["order:1"]


def test_a_choice_and_a_lazy_text_of_django_are_names() -> None:
    asked = """
settings.USE_I18N = False
for value in (order.state, State.NEW, gettext_lazy("a")):
    name(by_text, value)
"""
    assert said_by(CODE + asked).splitlines() == ["order:new", "order:new", "order:a"]
