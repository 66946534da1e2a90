import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Product",
            fields=[
                ("sku", models.CharField(max_length=40, primary_key=True, serialize=False)),
                ("price", models.PositiveIntegerField(help_text="in cents")),
                ("stock", models.PositiveIntegerField(default=0)),
            ],
        ),
        migrations.CreateModel(
            name="Order",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("quantity", models.PositiveIntegerField()),
                (
                    "state",
                    models.CharField(
                        choices=[("new", "New"), ("paid", "Paid"), ("sold out", "Sold Out")],
                        default="new",
                        max_length=10,
                    ),
                ),
                ("payment", models.CharField(blank=True, max_length=40)),
                (
                    "product",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, to="shop.product"
                    ),
                ),
            ],
        ),
    ]
