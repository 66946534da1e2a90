"""Tasks that publish their own message once more the first time that they are delivered, as one
that is parked and resumed. What the worker receives, at each delivery, goes to the journal."""

from __future__ import annotations

import os
import pickle
from base64 import b64encode
from contextvars import ContextVar
from typing import Any

from celery.exceptions import Ignore
from celery.signals import before_task_publish, task_received

from celery_relock.worker import parking
from tests.support import Journal, make_app

ACCEPT = ["json", "pickle", "msgpack", "yaml", "application/data"]

app = make_app(__name__, accept_content=ACCEPT, result_accept_content=["json", "pickle"])
journal = Journal.from_env()
tenant: ContextVar[str] = ContextVar("tenant", default="nobody")

if certificates := os.environ.get("RELOCK_TEST_CERTIFICATES"):
    from celery.security.serialization import register_auth

    register_auth(store=certificates)  # to read; a worker has no key

# What kombu and the broker write anew for each delivery.
ANEW = {"delivery_info", "delivery_tag", "application_headers"}


@task_received.connect(weak=False)
def record(request: Any, **_: Any) -> None:
    """Runs before the library's: the message is as kombu made it."""
    message = request.message
    properties = {k: v for k, v in message.properties.items() if k not in ANEW}
    raw = {
        "body": bytes(message.body) if isinstance(message.body, bytes) else message.body.encode(),
        "types": (message.content_type, message.content_encoding),
        "headers": dict(message.headers),
        "properties": properties,
        "sent to": [message.delivery_info[each] for each in ("exchange", "routing_key")],
    }
    written = b64encode(pickle.dumps(raw)).decode()
    journal.add("received", id=request.id, raw=written)


parking._may_be_parked = lambda request: True  # these tasks have no locks
parking.carry()


@before_task_publish.connect(weak=False)
def handler(headers: Any = None, **_: Any) -> None:
    if tenant.get() != "nobody":
        journal.add("handled", tenant=tenant.get())
        headers["x-tenant"] = tenant.get()


def again(self: Any) -> None:
    """The first time, publish the message again and end."""
    message = parking.carried(self.request)
    assert message is not None
    if (message.headers.get("relock") or {}).get("again"):
        return
    tenant.set("holder")
    text = parking.parked_text(self.app, message, {"again": True})
    assert text is not None
    try:
        parking.publish(self.app, text)
    finally:
        tenant.set("nobody")
    raise Ignore


class Overridden(app.Task):  # type: ignore[name-defined,misc]
    def apply_async(self, *args: Any, **options: Any) -> Any:
        if tenant.get() != "nobody":
            journal.add("overridden")
        return super().apply_async(*args, **options)


@app.task(bind=True, base=Overridden)
def mirror(self: Any, *args: Any, **kwargs: Any) -> Any:
    again(self)
    return [repr(args), repr(kwargs)]


@app.task(bind=True, base=Overridden, retry_backoff=False)
def retries(self: Any, *args: Any) -> Any:
    again(self)
    if self.request.retries < 3:
        raise self.retry(countdown=0)
    return self.request.retries


@app.task
def total(values: list[Any]) -> int:
    return len(values)


@app.task
def note(value: Any, name: str) -> None:
    journal.add("noted", name=name)
