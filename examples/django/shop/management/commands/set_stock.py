from django.core.management.base import BaseCommand, CommandError
from shop.tasks import set_stock


class Command(BaseCommand):
    help = "Write down how many pieces of a product there are."

    def add_arguments(self, parser):
        parser.add_argument("sku")
        parser.add_argument("count", type=int)

    def handle(self, sku, count, **options):
        lock = set_stock.lock_for(sku, count)
        if not lock.acquire(blocking_timeout=60):
            raise CommandError(f"{sku} is being sold for a minute now")
        try:
            changed = set_stock(sku, count)  # acquires the same lock: re-enters
        finally:
            lock.release()
        self.stdout.write(f"{sku}: {count}" if changed else f"no product {sku}")
