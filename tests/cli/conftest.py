"""As for what people look at: the commands print it."""

from tests.admin.conftest import held, key, locks, trips, worker

__all__ = ["held", "key", "locks", "trips", "worker"]
