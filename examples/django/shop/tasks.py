"""The tasks of the shop, and what they lock."""

import csv

from celery import shared_task
from celery.contrib.django.task import DjangoTask
from celery_relock import LockedTask
from celery_relock.errors import LockLost
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F

from . import payments
from .models import Order, Product


class ShopTask(LockedTask, DjangoTask):
    """A locked task with Django's `delay_on_commit`."""

    abstract = True


# Whoever changes the stock of a product holds this lock: these tasks, the view, the command.
STOCK = "stock:{sku}"


@shared_task(
    bind=True, base=ShopTask, lock_key=STOCK, autoretry_for=(LockLost,), retry_backoff=True
)
def sell(self, sku, order_id):
    """Charge for an order if the goods are there.

    No database transaction is open while the provider is asked, which can take a minute. The lock
    makes sure that nobody else sells the same goods in the meantime.
    """
    order = Order.objects.select_related("product").get(pk=order_id)
    if order.state != Order.State.NEW:
        return order.state  # the message was delivered twice
    key = f"order-{order_id}"
    if order.product.stock < order.quantity:
        payments.cancel(key)  # of an execution that charged, and then lost its lock
        state, payment, taken = Order.State.SOLD_OUT, "", 0
    else:
        payment = payments.charge(key, order.quantity * order.product.price)
        state, taken = Order.State.PAID, order.quantity
    with transaction.atomic(), self.lock.fenced(connection):
        Product.objects.filter(pk=sku).update(stock=F("stock") - taken)
        Order.objects.filter(pk=order_id).update(state=state, payment=payment)
    return state


@shared_task(bind=True, base=ShopTask, lock_key=STOCK)
def set_stock(self, sku, count):
    """Write down how many pieces there are."""
    with transaction.atomic(), self.lock.fenced(connection):
        return Product.objects.filter(pk=sku).update(stock=count)


@shared_task(
    base=ShopTask,
    lock_key="import:{supplier}",
    lock_on_conflict="drop",  # the next import makes up for it
    lock_dedup="until_start",  # one import in the queue is enough
)
def import_stock(supplier):
    """Read the counts of a supplier. Beat sends this every minute; an import can take longer."""
    with (settings.FEEDS / f"{supplier}.csv").open(newline="") as lines:
        # A direct call acquires the lock of the product, as a message would.
        return sum(set_stock(row["sku"], int(row["count"])) for row in csv.DictReader(lines))
