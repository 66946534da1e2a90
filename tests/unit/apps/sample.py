"""The smallest app that shows the test bench at work."""

from __future__ import annotations

from typing import Any

from tests.support import Journal, make_app

app = make_app(__name__)


@app.task(bind=True)
def stand_at_the_gate(self: Any, name: str) -> str:
    journal = Journal.from_env()
    journal.add("arrived", name=name)
    journal.wait_for("gate open")
    journal.add("left", name=name)
    journal.close()
    return f"{name} went through"
