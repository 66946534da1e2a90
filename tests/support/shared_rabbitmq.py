"""One RabbitMQ for all processes of a test run: its start costs ten seconds of two cores.

Who wants it connects to the socket of its keeper, a process of its own, and is told the port. The
first one starts the keeper. Once the last connection is closed, if only because its process was
killed, the keeper ends the server and itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import selectors
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.rabbitmq import RabbitServer

_ROOT = Path(__file__).parents[2]


class SharedRabbit:
    """A running server, from here until `close`.

    Args:
        folder: the same for all that share the server.

    Attributes:
        port, url: as of `RabbitServer`, which nobody may kill here.
    """

    #: Where the server of this process's test run writes.
    _log: Path | None = None

    def __init__(self, folder: Path) -> None:
        place = folder / "rabbitmq.socket"
        with (folder / "rabbitmq.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second one waits for the start
            joined = _join(place) or _start(place)
        self._connection, self.port, SharedRabbit._log = joined

    @classmethod
    def said(cls) -> str:
        """The last lines of its log, for a test that failed."""
        if cls._log is None or not cls._log.exists():
            return ""
        return "\n".join(cls._log.read_text(errors="replace").splitlines()[-60:])

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def close(self) -> None:
        """The last to leave returns when the server is gone."""
        with self._connection as connection, contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(30)
            connection.recv(1)


def _join(place: Path) -> tuple[socket.socket, int, Path] | None:
    """A connection to the keeper, the server's port and its log; None if there is none, or it is
    leaving."""
    connection = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):
        connection.connect(str(place))
        if told := connection.recv(1024).decode():
            port, _, log = told.partition(" ")
            return connection, int(port), Path(log)
    connection.close()
    return None


def _start(place: Path) -> tuple[socket.socket, int, Path]:
    place.unlink(missing_ok=True)
    # It outlives who starts it, so `reaper` is not for it. Its input is the first connection.
    with subprocess.Popen(
        [sys.executable, "-m", __name__, str(place)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
        if said == "ready\n" and (joined := _join(place)):
            keeper.returncode = 0  # nobody waits for it
            return joined
        raise RuntimeError(f"no RabbitMQ: {said}{keeper.stdout.read()}")


def _keep(place: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as ready:
        server = RabbitServer()
        listener.bind(place)
        listener.listen(64)
        print("ready", flush=True)
        ready.register(listener, selectors.EVENT_READ)
        ready.register(sys.stdin, selectors.EVENT_READ)
        try:
            last = _serve(ready, listener, f"{server.port} {server.log_file}".encode())
        finally:
            server.stop()
        last.close()


def _serve(ready: selectors.BaseSelector, listener: socket.socket, told: bytes) -> Any:
    """Until nobody is connected. Returns the last connection, to be closed by who ends all."""
    while True:
        for key, _ in ready.select():
            one: Any = key.fileobj
            if one is listener:
                connection, _ = listener.accept()
                ready.register(connection, selectors.EVENT_READ)
                connection.send(told)
                continue
            ready.unregister(one)  # they say nothing, so this is its end
            if len(ready.get_map()) == 1:
                return one
            one.close()


if __name__ == "__main__":
    _keep(sys.argv[1])
