"""What the message of a call says of its marker: written into its header when it is published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from celery.signals import before_task_publish

from ..worker import headers as run_headers
from ..worker.owner import running_request
from . import canvas, marker
from .marker import Marker


class Planned(NamedTuple):
    """What the message of a call that is being sent is to say; `run` is "" if any will do."""

    task_id: str
    marker: Marker
    execution_id: str = ""


_planned: ContextVar[Planned | None] = ContextVar("relock_planned", default=None)


@contextmanager
def sending(planned: Planned) -> Iterator[None]:
    token = _planned.set(planned)
    try:
        yield
    finally:
        _planned.reset(token)


def _write(headers: Any = None, body: Any = None, **_: Any) -> None:
    header = headers.get(run_headers.NAME) if isinstance(headers, dict) else None
    # A message that is sent once more keeps what it says.
    if not header or "dedup" in header:
        return
    fields = headers if "id" in headers else body if isinstance(body, dict) else {}
    planned = _planned.get()
    # Another handler of this signal may send a message of its own.
    if planned is not None and fields.get("id") == planned.task_id:
        header["dedup"] = list(_as_before(fields) or planned.marker)
        header["execution_id"] = planned.execution_id or header["execution_id"]
    elif canvas.goes_on():
        header["dedup"] = ["", marker.OWN]


def _as_before(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a retry has from the call itself: none of its messages counts, if that one does not."""
    request = running_request()
    if request is None or not run_headers.is_retry(fields, request):
        return None
    before = run_headers.read(request).dedup
    return before if before == ("", marker.OFF) else None


# After the header itself, which `headers` writes.
before_task_publish.connect(_write, weak=False, dispatch_uid="celery_relock.dedup")
