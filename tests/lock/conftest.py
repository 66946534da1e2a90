"""As for the engine, of which a `Lock` is the face."""

from tests.engine.conftest import in_thread, lock, nothing_left_behind, proxy, told

__all__ = ["in_thread", "lock", "nothing_left_behind", "proxy", "told"]
