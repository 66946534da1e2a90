"""What hears a worker's events, as Flower and `celery events` do."""

from __future__ import annotations

import contextlib
import threading

from celery.events.state import State

from tests.support.waiting import wait_for


class Monitor:
    """Hears all events of an app's workers, and keeps the state that Celery makes of them."""

    def __init__(self, app):
        self.events: list[dict] = []
        self.state = State()
        self._end = False
        ready = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(app, ready), daemon=True)
        self._thread.start()
        assert ready.wait(30)

    def _watch(self, app, ready):
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": self._hear})
            with receiver.consumer_context() as (clone, *_):
                # kombu subscribes when it first looks for messages, and not before.
                with contextlib.suppress(TimeoutError):
                    clone.drain_events(timeout=0.2)
                ready.set()
                while not self._end:
                    try:
                        clone.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    def _hear(self, event):
        self.state.event(dict(event))
        self.events.append(event)

    def of(self, uuid, kind=""):
        return [
            event
            for event in tuple(self.events)
            if event.get("uuid") == uuid and event["type"].startswith(kind)
        ]

    def wait(self, uuid, kind, timeout=30.0):
        return wait_for(lambda: self.of(uuid, kind), timeout, f"{kind} of {uuid}")[0]

    def close(self):
        self._end = True
        self._thread.join(30)
