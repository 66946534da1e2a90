"""The same app before its tasks were locked: nothing of the library is loaded."""

from __future__ import annotations

from tests.support import make_app

app = make_app("shop")


@app.task(name="charge")
def charge(account: str) -> int:
    return 1
