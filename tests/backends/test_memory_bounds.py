"""What nobody uses any more leaves nothing in the memory of the process."""

from __future__ import annotations

import asyncio

from celery_relock.backends.local import LocalBackend
from celery_relock.backends.memory import MemoryBackend


def test_an_inbox_that_nobody_hears_any_more_is_gone() -> None:
    backend = MemoryBackend()
    backend.listen("of a thread", lambda: None, print, wanted=lambda: False)
    assert not backend.state.ears

    async def hears() -> None:
        ready = asyncio.Event()
        listens = asyncio.ensure_future(LocalBackend(backend).listen("of a loop", ready.set, print))
        await ready.wait()
        assert list(backend.state.ears) == ["of a loop"]
        listens.cancel()
        await asyncio.wait([listens])

    asyncio.run(hears())
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
