from django.db import models


class Product(models.Model):
    sku = models.CharField(max_length=40, primary_key=True)
    price = models.PositiveIntegerField(help_text="in cents")
    stock = models.PositiveIntegerField(default=0)


class Order(models.Model):
    class State(models.TextChoices):
        NEW = "new"
        PAID = "paid"
        SOLD_OUT = "sold out"

    product = models.ForeignKey(Product, models.PROTECT)
    quantity = models.PositiveIntegerField()
    state = models.CharField(max_length=10, choices=State, default=State.NEW)
    payment = models.CharField(max_length=40, blank=True)
