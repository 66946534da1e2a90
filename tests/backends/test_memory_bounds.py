"""What nobody uses any more leaves nothing in the memory of the process."""

from __future__ import annotations

from celery_relock.backends.memory import MemoryBackend
from celery_relock.engine.protocol import Listener


def test_an_inbox_that_nobody_hears_any_more_is_gone() -> None:
    backend = MemoryBackend()
    backend.listen("inbox", Listener(lambda: None, print, lambda: False))
    assert not backend.state.ears


def test_a_worker_that_consumes_no_longer_is_forgotten_and_to_ask_for_one_leaves_nothing() -> None:
    now = 1000.0
    backend = MemoryBackend(clock=lambda: now)
    backend.announce(["a queue"], "stopped", 60.0)
    backend.announce(["a queue"], "killed", 60.0)
    backend.announce(["a queue"], "stopped", 0.0)
    now += 61.0
    backend.announce(["a queue"], "living", 60.0)
    assert list(backend.state.live["a queue"]) == ["living"]
    backend.announce(["a queue"], "living", 0.0)
    assert not backend.consumed("another queue")
    assert not backend.state.live
