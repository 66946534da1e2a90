"""A TCP proxy that passes bytes on until it is cut, or is to hold them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence


def hang_up(servers: Sequence[socket.socket]) -> None:
    """End connections to a server, and wait until it has closed its side of each.

    A Redis that has not noticed yet gives the BRPOP of an old connection what is put back by a new
    one, and it is lost; and it takes a subscriber that is gone for one that hears.
    """
    for server in servers:
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_WR)
    until = time.monotonic() + 5  # it can be stopped
    for server in servers:
        with contextlib.suppress(OSError):
            server.settimeout(max(until - time.monotonic(), 0.01))
            while server.recv(65536):
                pass


class TcpProxy:
    """A proxy on a free port of 127.0.0.1 to another port of it.

    Attributes:
        port: where it listens.
        url: for whoever makes one of the port.
        taken: how many connections it has passed on.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = ""
        self.taken = 0
        self._refuses = False
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._open: list[_Connection] = []
        # Between the look whether it refuses, and the note of a connection that `refuse` is to end.
        self._accepting = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection; new ones are taken."""
        with self._accepting:
            ended, self._open = self._open, []
        for connection in ended:
            connection.is_cut = True
        hang_up([connection.server for connection in ended])
        for connection in ended:
            for side in (connection.client, connection.server):
                with contextlib.suppress(OSError):  # shut down, so that whoever reads from it wakes
                    side.shutdown(socket.SHUT_RDWR)
                side.close()

    def refuse(self) -> None:
        """End every connection, and each new one at once, until `accept`."""
        self._refuses = True
        self.cut()

    def accept(self) -> None:
        self._refuses = False

    def hold(self) -> None:
        """Keep back what is on its way, and end no connection: as a network does that is cut and
        mended before TCP gives up."""
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.go_on()

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._accepting:
                    self._take(client)

    def _take(self, client: socket.socket) -> None:
        try:
            if self._refuses:
                raise ConnectionRefusedError
            server = socket.create_connection(("127.0.0.1", self._target))
        except OSError:  # also if the server is down
            client.close()
            return
        self.taken += 1
        self._open.append(connection := _Connection(client, server, self._goes_on))
        for sides in ((client, server), (server, client)):
            threading.Thread(target=connection.pass_on, args=sides, daemon=True).start()


class _Connection:
    def __init__(
        self, client: socket.socket, server: socket.socket, goes_on: threading.Event
    ) -> None:
        self.client = client
        self.server = server
        self._goes_on = goes_on
        self.is_cut = False

    def pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._goes_on.wait()
                sink.sendall(data)
        if not self.is_cut:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
