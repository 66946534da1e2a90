"""Draw who holds which lock when: run the flows of docs/workflows.md and the calls of the README in
a real worker, look at the locks every few milliseconds, and write the pictures to docs/pictures.

    scripts/venv test && .venv/bin/python -m scripts.draw_workflows
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from celery import chain, group

from celery_relock import locked
from celery_relock.declaration import engine_of
from tests.support import RedisServer, Worker, find_redis_server
from tests.support.parked import survey_of

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1a202c }
.held { fill: #2b6cb0 }
.kept { fill: #bcd4ee }
.waits { fill: #e2e2e2 }
.stranger { fill: #c05621 }
.back { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e2e8f0 }
  .waits { fill: #4a5568 }
  .back { fill: #1a202c }
}"""
LEGEND = {
    "held": "holds, its step runs",
    "kept": "left to it, on its way",
    "waits": "waits, parked",
    "stranger": "another permit",
}
WIDTH, LEFT, ROW = 860, 145, 26


class Span(NamedTuple):
    """A time in which an execution was "held", "kept" or "waits", from and to in seconds."""

    execution_id: str
    kind: str
    start: float
    end: float


def watch(look: Callable[[], dict[str, str]], stop: threading.Event) -> list[Span]:
    """The spans of every execution."""
    began, spans = time.monotonic(), []
    since: dict[str, tuple[str, float]] = {}
    while True:
        over, found, now = stop.is_set(), look(), time.monotonic() - began
        for run, (kind, start) in list(since.items()):
            if over or found.get(run) != kind:
                spans.append(Span(run, kind, start, now))
                del since[run]
        if over:
            return spans
        for run, kind in found.items():
            since.setdefault(run, (kind, now))
        time.sleep(0.004)


def flows(module: Any) -> dict[str, Callable[[], Any]]:
    def step(name: str, task: Any = module.plain) -> Any:
        return task.s(account="42", name=name, do="slow")

    def later(signature: Any) -> Any:
        return signature.set(countdown=0.25)  # as if its queue were long

    def of_chain() -> Any:
        return chain(
            step("reserve", module.holding), later(step("convert")), step("book", module.locking)
        )

    def of_chord() -> Any:
        members = group(step("part 1"), later(step("part 2")))
        return locked(chain(step("split"), members, step("join")), key="account:42")

    def of_part() -> Any:
        inside = locked(chain(step("reserve"), later(step("book"))), key="account:42")
        return chain(step("before"), inside, step("after"))

    return {"chain": of_chain, "chord": of_chord, "part": of_part}


def turns(module: Any) -> list[Any]:
    calls = {"account 42, first": "42", "account 42, second": "42", "account 7": "7"}
    sent = []
    for name, account in calls.items():
        sent.append(module.locking.s(account=account, name=name, do="slow").delay())
        time.sleep(0.02)  # received in this order
    return sent


def record(worker: Worker, make: Callable[[], list[Any]]) -> tuple[list[Span], dict[str, str]]:
    """The spans of some calls, and the names of their executions."""
    engine = engine_of(worker.module.app)

    def look() -> dict[str, str]:
        found: dict[str, str] = {}
        for name in ("account:42", "account:7"):
            state = survey_of(engine, name)
            found |= {each.execution_id: "waits" for each in state.places}
            for each in state.holds:
                found[each.execution_id] = "kept" if each.attempt_id == "-" else "held"
        return found

    before, stop, found = len(worker.journal.events()), threading.Event(), []
    watcher = threading.Thread(target=lambda: found.extend(watch(look, stop)))
    watcher.start()
    for result in make():
        result.get(timeout=30)
    time.sleep(0.1)
    stop.set()
    watcher.join()
    names = {}
    for event in worker.journal.events()[before:]:
        if event.name == "enter":
            names |= dict.fromkeys(event["holds"], event["step"])
    return found, names


def beside_a_stranger(worker: Worker, make: Callable[[], Any]) -> list[Any]:
    """A flow, and a task that wants its lock as soon as it has begun."""
    before = len(worker.journal.events())
    sent = make().delay()
    worker.journal.wait_for(lambda e: any(one.data.get("holds") for one in e[before:]))
    return [sent, worker.module.locking.s(account="42", name="stranger", do="slow").delay()]


def draw(
    title: str, spans: list[Span], names: dict[str, str], legend: dict[str, str] = LEGEND
) -> str:
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    scale = (WIDTH - LEFT - 10) / (end - start)
    rows = list(
        dict.fromkeys(
            names.get(s.execution_id, "enter") for s in sorted(spans, key=attrgetter("start"))
        )
    )
    rows.sort(key=lambda name: name == "stranger")
    height = ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        '<rect class="back" width="100%" height="100%" rx="6"/>',
    ]
    for number, name in enumerate(rows):
        lines.append(f'<text x="10" y="{ROW * number + 18}">{name}</text>')
    for span in spans:
        name = names.get(span.execution_id, "enter")
        kind = "stranger" if name == "stranger" and span.kind == "held" else span.kind
        x, y = LEFT + (span.start - start) * scale, ROW * rows.index(name) + 5
        width = max((span.end - span.start) * scale, 1.5)
        lines.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 10}"/>'
        )
    for number, (kind, text) in enumerate(legend.items()):
        x, y = LEFT + 190 * number, ROW * len(rows) + 14
        lines.append(f'<rect class="{kind}" x="{x}" y="{y}" width="12" height="12"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 11}">{text}</text>')
    lines.append(f'<text x="10" y="{ROW * len(rows) + 25}">{end - start:.2f} s</text></svg>')
    return "\n".join(lines) + "\n"


def main() -> None:
    binary = find_redis_server()
    assert binary is not None, "no redis-server"
    server = RedisServer(binary=binary)
    worker = Worker("tests.workflow.apps.workflows", server.url, "pictures", concurrency=4)
    try:
        PICTURES.mkdir(exist_ok=True)
        for name, make in flows(worker.module).items():
            spans, names = record(worker, partial(beside_a_stranger, worker, make))
            (PICTURES / f"workflow-{name}.svg").write_text(draw(f"A {name}", spans, names))
            print(f"{name}: {len(spans)} spans of {len(names)} executions")
        spans, names = record(worker, partial(turns, worker.module))
        legend = {"held": "holds the lock, runs", "waits": "parked in Redis"}
        (PICTURES / "turns.svg").write_text(draw("Three calls", spans, names, legend))
    finally:
        worker.close()
        server.stop()


if __name__ == "__main__":
    main()
