"""What is done to the processes and to the server while they work."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

from tests.chaos.checker import WIPE
from tests.chaos.history import Recorder
from tests.support import RedisServer


class Faults:
    """Does one fault after another, every kind once in each round, in an order of the seed.

    Args:
        server: the server of the locks.
        pids: the processes that live now.
        respawn: puts a new process in the place of one that was killed.
        lease: seconds; processes are frozen, and the server paused, for a little less than that
            and for up to twice as long.
    """

    #: For this share of the time, and so many seconds at least, nothing is done at first: then the
    #: rule of turns is judged.
    CALM, AT_LEAST = 0.1, 2.0

    def __init__(
        self,
        server: RedisServer,
        recorder: Recorder,
        pids: Callable[[], list[int]],
        respawn: Callable[[int], None],
        lease: float,
        seed: int,
    ) -> None:
        self._server = server
        self._recorder = recorder
        self._pids = pids
        self._respawn = respawn
        self._lease = lease
        self._random = random.Random(seed)
        self.kinds: dict[str, Callable[[], None]] = {
            "kill -9": self._kill,
            "SIGSTOP": self._freeze,
            "CLIENT KILL normal": lambda: self._disconnect("normal"),
            "CLIENT KILL pubsub": lambda: self._disconnect("pubsub"),
            "CLIENT PAUSE": self._pause,
            "SCRIPT FLUSH": self._forget_scripts,
            "restart with data": lambda: self._server.restart(keep_data=True),
            WIPE: lambda: self._server.restart(keep_data=False),
        }

    def run(self, until: float) -> None:
        """Until the monotonic time `until`, and at least one round."""
        time.sleep(max(self.CALM * (until - time.monotonic()), self.AT_LEAST))
        for count, (kind, act) in enumerate(self._sequence()):
            if count >= len(self.kinds) and time.monotonic() >= until:
                return
            began = time.monotonic()
            act()
            self._recorder.write("fault", began, kind=kind, ended=time.monotonic())
            time.sleep(self._random.uniform(0.2, 0.8) * self._lease)

    def _sequence(self) -> Iterator[tuple[str, Callable[[], None]]]:
        while True:
            kinds = list(self.kinds.items())
            self._random.shuffle(kinds)
            yield from kinds

    def _some(self) -> list[int]:
        pids = self._pids()
        return self._random.sample(pids, -(-len(pids) // 3))

    def _kill(self) -> None:
        for pid in self._some():
            os.kill(pid, signal.SIGKILL)
            self._respawn(pid)

    def _freeze(self) -> None:
        pids = self._some()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self._lease * self._random.choice((0.8, 1.3, 2.0)))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    def _disconnect(self, kind: str) -> None:
        self._server.client().client_kill_filter(_type=kind, skipme=True)

    def _pause(self) -> None:
        seconds = self._lease * self._random.uniform(0.3, 1.5)
        self._server.client().client_pause(round(seconds * 1000))
        time.sleep(seconds)

    def _forget_scripts(self) -> None:
        self._server.client().script_flush()
