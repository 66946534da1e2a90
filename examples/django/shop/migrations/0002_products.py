from django.db import migrations


def add_products(apps, editor):
    product = apps.get_model("shop", "Product")
    product.objects.create(sku="lamp", price=4900, stock=3)
    product.objects.create(sku="chair", price=12900, stock=10)


class Migration(migrations.Migration):
    dependencies = [("shop", "0001_initial")]
    operations = [migrations.RunPython(add_products, migrations.RunPython.noop)]
