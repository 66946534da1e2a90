"""What docs/redis.md says that a user of the Redis may do at the least, and all that needs it."""

from __future__ import annotations

import re
from pathlib import Path

from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.engine.protocol import (
    Claim,
    Held,
    Parked,
    ParkRequest,
    Queued,
    Release,
    Renewal,
    Successor,
)

_PAGE = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
PASSWORD = "p@ss/w:o#r?d%&; +"


def least() -> list[str]:
    """The rules of the page, of a user without a name and a password."""
    found = re.search(
        r"^ACL SETUSER relock on >PASSWORD (.*?)^```", _PAGE, re.DOTALL | re.MULTILINE
    )
    assert found
    return found[1].split()


def claim(run: str, attempt_id: str = "n", *names: str, **more: object) -> Claim:
    names = names or ("a",)
    claim = {"owner": run, "limits": (1,) * len(names), "lease": 30.0, **more}
    return Claim(run, attempt_id, names=names, **claim)  # type: ignore[arg-type]


def everything(backend: RedisBackend) -> None:
    """Every verb, and every way through the scripts that needs a command of its own."""
    assert isinstance(backend.acquire(claim("r1", owner="o")), Held)
    assert isinstance(backend.acquire(claim("r2"), 6.0, "box"), Queued)
    backend.acquire(claim("r3"))
    assert isinstance(backend.acquire(claim("r4", owner="o", ancestors=("r1",))), Held)
    park_request = ParkRequest("message", "home", "task", 60.0, 1)
    assert isinstance(backend.park(claim("r5", "n", "a", "b"), park_request), Parked)
    backend.park(claim("r6"), park_request)
    assert isinstance(backend.acquire(claim("r7"), 90.0, "box"), Queued)
    assert backend.renew([Renewal("a", "r1", "n", 30.0), Renewal("a", "r4", "n", 600.0)]) == [
        True,
        True,
    ]
    backend.heartbeat([Renewal("a", "r2", "n", 30.0, 60.0), Renewal("a", "r1", "n", 30.0, 60.0)])
    backend.release(Release(("a",), "r4", "n", ended="execution", remember=60.0))
    backend.release(Release(("a",), "r1", "n", successor=Successor("r1b", 30.0)))
    assert backend.inspect("a").waiting == 3
    backend.release(Release(("a",), "r1b", "-"))
    backend.acquire(claim("r1b", "m"))
    backend.release(Release(("a",), "r1b", "m"))
    backend.release(Release(("a",), "r2", "n"))
    backend.resume("home", "by", ("task",))
    assert backend.withdraw("r5", 60.0)
    backend.force_release("a")
    backend.resume("home", "by2")
    backend.announce(["home:queue"], "worker", 5.0)
    backend.arrived(["r5"], 5.0)
    for number in range(40):  # so many that the lock has an index
        backend.acquire(claim(f"m{number}", "n", "many", owner="o", limits=(50,)))
    assert isinstance(backend.acquire(claim("in", "n", "many", owner="o", by_owner=True)), Held)
