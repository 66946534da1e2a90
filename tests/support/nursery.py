"""Workers of a process that has imported Celery already: that is two thirds of a worker's start.

`celery_relock` is not among what it imports: each worker does so itself, as in real life. A pool
that patches the standard library needs a fresh interpreter, and so does whoever sets what Celery
reads while it is imported.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tests.support import reaper

MAIN = "import sys; from tests.support.nursery import main; sys.exit(main(int(sys.argv[1]))())"
ROOT = Path(__file__).parents[2]
IMPORTED = (
    "celery.__main__",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.events.state",
    "celery.fixups.django",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "kombu.pidbox",
    "kombu.transport.pyamqp",
    "kombu.transport.redis",
    "tests.support",
)


class Child:
    """As much of a `subprocess.Popen` as a `Worker` uses; the nursery is its parent."""

    def __init__(self, pid: int, stdout: TextIO, nursery: Nursery) -> None:
        self.pid = pid
        self.stdout = stdout
        self._nursery = nursery

    def poll(self) -> int | None:
        return self._nursery.statuses.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        statuses, changed = self._nursery.statuses, self._nursery.changed
        with changed:
            if not changed.wait_for(lambda: self.pid in statuses, timeout):
                raise subprocess.TimeoutExpired("celery worker", timeout or 0.0)
        return statuses[self.pid]


class Nursery:
    """The process, and this end of the connection to it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.statuses: dict[int, int] = {}
        self.changed = threading.Condition()
        self._started: list[int] = []
        self._asking = threading.Lock()
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self.process = reaper.start(
                [sys.executable, "-c", MAIN, str(there.fileno())],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
            )
        threading.Thread(target=self._read, daemon=True).start()
        atexit.register(self._close)

    def start(self, arguments: list[str], env: Mapping[str, str]) -> Child:
        """`celery <arguments>`, as the leader of a process group; it writes to `Child.stdout`."""
        out, written = os.pipe()
        request = json.dumps([arguments, dict(env)]).encode()
        with self._asking:
            socket.send_fds(self._socket, [request], [written])
            os.close(written)
            with self.changed:
                if not self.changed.wait_for(lambda: self._started, 60):
                    raise TimeoutError("the nursery starts no worker")
                pid = self._started.pop()
        return reaper.adopt(Child(pid, os.fdopen(out, errors="replace"), self))

    def _close(self) -> None:
        with self._socket:
            self._socket.shutdown(socket.SHUT_RDWR)
        self.process.wait()

    def _read(self) -> None:
        while told := self._socket.recv(64):
            pid, *status = map(int, told.split())
            with self.changed:
                if status:
                    self.statuses[pid] = status[0]
                else:
                    self._started.append(pid)
                self.changed.notify_all()


_nursery: Nursery | None = None
_lock = threading.Lock()


def start(arguments: list[str], env: Mapping[str, str]) -> Child:
    """A worker of this process's nursery, which is made for the first one."""
    global _nursery
    with _lock:
        if _nursery is None or _nursery.process.poll() is not None:
            _nursery = Nursery(env)
    return _nursery.start(arguments, env)


def _serve(there: socket.socket) -> Any:
    """Start what is asked for, tell what has ended. Returns in a new worker alone: its `main`."""
    bell, wakes = socket.socketpair()
    for end in (bell, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(there, selectors.EVENT_READ)
        selector.register(bell, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if there in ready:
                request, files, _, _ = socket.recv_fds(there, 1 << 20, 1)
                if not request:
                    sys.exit()
                pid = os.fork()
                if pid == 0:
                    break
                os.close(files[0])
                there.send(b"%d" % pid)
            if bell in ready:
                bell.recv(4096)
                _tell_of_the_dead(there)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for each in (there, bell, wakes):
        each.close()
    return _become(*json.loads(request), files[0])


def _tell_of_the_dead(there: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        there.send(b"%d %d" % (pid, os.waitstatus_to_exitcode(status)))


def _become(arguments: list[str], env: dict[str, str], out: int) -> Any:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it was asked for before
    # The interpreter read this one when the nursery began.
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    for number in (1, 2):
        os.dup2(out, number)
    os.close(out)
    sys.argv = ["celery", *arguments]
    return sys.modules["celery.__main__"].main


def main(socket_number: int) -> Any:
    for name in IMPORTED:
        importlib.import_module(name)
    platform.platform()  # a program tells it, which each worker would start
    gc.freeze()
    return _serve(socket.socket(fileno=socket_number))
