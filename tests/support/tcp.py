"""A TCP proxy that passes bytes on until it is cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class TcpProxy:
    """A proxy on a free port of 127.0.0.1 to another port of it.

    Attributes:
        port: where it listens.
        url: for whoever makes one of the port.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = ""
        self._refuses = False
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection; new ones are taken."""
        ended, self._open = self._open, []
        for connection in ended:
            with contextlib.suppress(OSError):  # shut down, so that whoever reads from it wakes
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def refuse(self) -> None:
        """End every connection, and each new one at once, until `accept`."""
        self._refuses = True
        self.cut()

    def accept(self) -> None:
        self._refuses = False

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._refuses:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_pass_on, args=(source, sink), daemon=True).start()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
