"""Looking out for an answer for a moment, before the thread sleeps until it comes.

A Redis on the same machine answers within 70 µs. A thread that sleeps meanwhile is woken so much
later than that, most of all in a virtual machine, that a pair of commands takes half as long again
(`docs/benchmarks.md`). Where answers take longer, nobody looks out for them.
"""

from __future__ import annotations

import select
import socket
import threading
import time

from ..engine.platform import green

# For how long to look out, in seconds.
_MOMENT = 0.0002
# After so many answers in a row that took longer, none is looked out for in so many seconds.
_LATE, _PAUSE = 5, 0.1


class BusyPoll:
    """Busy polling, which `SO_BUSY_POLL` of socket(7) is for network cards, for as long as it
    helps: towards a server that is far or busy it takes 2 ms of a core in a second at the most.
    """

    __slots__ = ("_again_at", "_late")

    def __init__(self) -> None:
        self._late = 0
        self._again_at = 0.0

    def wait(self, sock: socket.socket) -> None:
        """Returns when there is something to read, or when it is better to sleep until there is."""
        now = time.monotonic()
        if (self._late >= _LATE and now < self._again_at) or not _undisturbing():
            return
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        until = now + _MOMENT
        while not poller.poll(0):
            if time.monotonic() > until:
                self._late += 1
                self._again_at = until + _PAUSE
                return
        self._late = 0


def _undisturbing() -> bool:
    """Whether nobody else is likely to want the interpreter meanwhile: in the main thread, where
    the tasks of a prefork worker run, and not where greenlets share it."""
    if threading.current_thread() is not threading.main_thread() or green():
        return False
    # eventlet takes it away from sockets that it has made its own, also where threads are left.
    return hasattr(select, "poll")
