"""Coroutines in a test: run with a bound, and waiting for what has no event of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def run(main: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    """Run a coroutine in a loop of its own, for so long at the most."""
    return asyncio.run(asyncio.wait_for(main, seconds))


async def until(seen: Callable[[], Any]) -> None:
    """Wait until that is true, as long as `run` lets it."""
    while not seen():
        await asyncio.sleep(0.01)
