"""The counter for the backend in memory: the same short names, and a hand on its clock."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

from celery_relock.backends.memory import MemoryBackend
from celery_relock.engine.protocol import Message
from tests.support.desk import Desk


class Ear:
    """A process that hears of grants."""

    def __init__(self, backend: MemoryBackend, process: str):
        self._listens = ExitStack()
        self._ear = self._listens.enter_context(backend.ear(process))

    def heard(self) -> list[str]:
        """All messages since the last call, as Redis has them."""
        found = []
        while self._ear.heard:
            *words, fence = self._ear.heard.popleft()
            found.append(" ".join([*words, str(fence)] if fence else words))
        return found

    def leave(self) -> None:
        """Be unreachable from now on."""
        self._listens.close()

    def close(self) -> None:
        pass


class MemoryDesk(Desk):
    """Times of what it shows are in milliseconds, as in Redis; what "lapsed" ended at 1."""

    def __init__(self) -> None:
        self._now = time.time()
        self.backend: Any = MemoryBackend(self._clock)
        self._inboxes = []
        self._out: list[Message] = []
        self.recheck = None
        # Whoever asks for a key here asks for what there is not.
        self.client = self.keys = SimpleNamespace()

    def _clock(self) -> float:
        """Goes on by a millisecond at each look, and else by `wait_ms`."""
        self._now += 0.001
        return self._now

    def waiters(self, name: str = "a") -> list[str]:
        found = self.backend.state.locks.get(name)
        return [] if found is None else list(found.queue)

    def listen(self, process: str) -> Any:
        self._inboxes.append(Ear(self.backend, process))  # who listens has to be kept
        return self._inboxes[-1]

    def now_ms(self) -> float:
        return self._now * 1000

    def wait_ms(self, milliseconds: float) -> None:
        self._now += milliseconds / 1000

    def lapse(self, run: str, name: str = "a") -> None:
        self.backend.state.locks[name].holds[run].expiry = 0.001

    def lapse_place(self, run: str, name: str = "a", **facts: Any) -> None:
        place = self.backend.state.locks[name].queue[run]
        in_line = facts.pop("line", {})
        for fact, value in (facts or ({} if in_line else {"expiry": 1})).items():
            setattr(place, fact, value if fact == "sent" else value / 1000)
        for fact, value in in_line.items():
            setattr(place.in_line, fact, value / 1000)

    def place(self, run: str, name: str = "a") -> dict[str, Any]:
        place = self.backend.state.locks[name].queue[run]
        facts = {
            fact: getattr(place, fact) for fact in ("expiry", "back", "first", "life", "unheard")
        }
        facts = {fact: int(at * 1000) for fact, at in facts.items() if at}
        if place.sent:
            facts["sent"] = place.sent
        if place.arrived:
            facts["arrived"] = True
        if place.in_line:
            facts["line"] = {"ends": int(place.in_line.ends * 1000)}
        return {
            "attempt": place.claim.attempt_id,
            "inbox": place.inbox,
            "label": place.claim.label,
            "parked": place.parked,
            "by_owner": place.claim.by_owner,
            "ancestors": " ".join(place.claim.ancestors),
            **({"names": list(place.limits)} if len(place.limits) > 1 else {}),
            **facts,
        }

    def age_call(self, run: str, name: str, *, waited_for: bool = True) -> None:
        place = self.backend.state.locks[name].queue[run]
        place.in_line.call = place.in_line.call._replace(life=self._now * 2)
        self.lapse_place(run, name, line={"due": 1}, **({"turn": 1} if waited_for else {}))

    def all_due(self) -> None:
        for due in (self.backend.state.look_at, self.backend.state.resume_at):
            due.update(dict.fromkeys(due, 0.001))

    def forget(self, run: str) -> None:
        self.backend.state.past.pop(run, None)

    def stranger(self, name: str, *, goes: bool = False) -> None:
        """There is none."""

    def out_of_memory(self) -> AbstractContextManager[None]:
        """No server."""
        return nullcontext()

    def inbox_of(self, run: str, name: str = "a") -> str:
        return self.backend.state.locks[name].holds[run].inbox

    def left(self) -> list[str]:
        state = self.backend.state
        kept = {"locks", "parked", "of_task", "look_at", "resume_at", "owed"}
        return [what for what in kept if any(getattr(state, what).values())]

    def wipe(self) -> None:
        self.backend.clear()

    def close(self) -> None:
        pass
