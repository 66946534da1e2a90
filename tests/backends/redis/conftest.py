"""As for the engine: most of what a backend promises shows in what an engine does with it."""

from __future__ import annotations

from tests.engine.conftest import in_thread, lock, nothing_left_behind, proxy, runs

__all__ = ["in_thread", "lock", "nothing_left_behind", "proxy", "runs"]
