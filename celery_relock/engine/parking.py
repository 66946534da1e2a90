"""The parked messages of a backend: resumed when their turn has come, and withdrawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from ..errors import LockUnavailable
from . import events, ids
from .events import logger
from .interrupt import is_thrown_in
from .platform import fork_gate
from .protocol import DEBOUNCE, REMEMBER, REMEMBER_ATTEMPT, Backend, Message, Release


class Sender:
    """Publishes parked messages to the brokers of some apps. This one is of a process without an
    app, such as that of a plain `Lock`: no backend hands it a message, as it is at home nowhere.

    Attributes:
        homes: which apps and brokers, ids with spaces between; no passwords.
    """

    homes = ""

    def reachable(self) -> str:
        """Those of `homes` whose brokers answer, as far as that is known."""
        return self.homes

    def doubt(self, app: object) -> None:
        """The broker of this app may not answer any more."""

    def send(self, message: Message) -> None:
        """Publish the message. Raises whatever the broker's client raises."""
        raise NotImplementedError


class Parking:
    """The parked messages of one backend, as far as this process can resume them.

    Attributes:
        backend: where they are parked.
        sender: publishes messages to their broker.
        remember: for how many seconds an execution counts as ended that was taken out of the queue.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.remember = REMEMBER
        self.sender = Sender()

    def publish(self, messages: Iterable[Message]) -> None:
        """Publish messages whose turn has come. One that cannot be sent stays parked, and its turn
        comes again; so do those behind one that the broker did not answer for, as a body's result
        may wait for this."""
        for message in messages:
            try:
                with fork_gate.closed():
                    self.sender.send(message)
                if message.name.startswith(DEBOUNCE):
                    self._sent(message)
            except Exception as error:
                if is_thrown_in(error):
                    raise
                logger.warning(
                    "A message that is parked for the lock %r could not be resumed, trying again "
                    "in some seconds: %s",
                    message.name,
                    error,
                )
                if isinstance(error, TimeoutError):
                    return

    def _sent(self, message: Message) -> None:
        """The message of a burst is the broker's from now on. If nobody hears of that, a copy of it
        is published later, and known as one."""
        with suppress(LockUnavailable):
            self.backend.withdraw(message.execution_id, REMEMBER_ATTEMPT)

    def resume(self, tasks: Sequence[str] = ()) -> float | None:
        """Resume whatever is due, and these tasks (short ids) in any case.

        Returns:
            In how many seconds to look again; None while nothing is parked.

        Raises:
            LockUnavailable, LockConfigError: see `Backend`.
        """
        with fork_gate.closed():
            homes = self.sender.reachable()
        found = self.backend.resume(homes, ids.new_attempt_id(), tasks)
        for call in found.passed:
            with fork_gate.closed():
                events.tell_passed(call)
        self.publish(found.messages)
        return found.recheck

    def release(self, request: Release) -> bool:
        """Release what an attempt has, and resume whose turn comes by that. False if it had
        nothing."""
        back = self.backend.release(request._replace(homes=self.sender.homes))
        self.publish(back.messages)
        return back.had

    def withdraw(
        self, execution_id: str, remember: float | None = None, attempt_id: str = ""
    ) -> bool:
        """Take an execution's message out of its queues for good, and resume whose turn comes by
        that. False if it was not parked. `attempt_id`: see `Backend.withdraw`."""
        remember = self.remember if remember is None else remember
        had = self.backend.withdraw(execution_id, remember, attempt_id)
        if had:
            self.resume_here()
        return had

    def resume_here(self) -> None:
        """Resume what a worker would otherwise, which may not run: some start one when there are
        messages in their queue."""
        with suppress(LockUnavailable):
            if self.sender.homes:
                self.resume()
