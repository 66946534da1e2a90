"""The keeper: a process that starts Redis and the worker, and ends them when the demo has ended.

It reads its standard input, which the demo holds open. The system closes it when the demo ends, in
whatever way: done, Ctrl-C, `kill -9`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROCESSES = 4


def keep(binary: str) -> None:
    """Start, print `URL folder`, wait for the demo to end, end everything."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a SIGQUIT is no reason for a core file
    started: list[subprocess.Popen[Any]] = []
    folder = tempfile.mkdtemp(prefix="relock-demo-")
    try:
        url = _start_redis(binary, folder, started)
        _start_worker(url, folder, started)
        print(url, folder, flush=True)
        sys.stdin.read()
    finally:
        for process in reversed(started):
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)


def _start_redis(binary: str, folder: str, started: list[subprocess.Popen[Any]]) -> str:
    for _ in range(5):  # somebody else may take the free port first
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder]
        # A server refuses to start under a locale that the system does not have.
        server = _start([*command, "--save", ""], Path(folder, "redis.log"), started, LC_ALL="C")
        while server.poll() is None:
            if _answers(port):
                return f"redis://127.0.0.1:{port}/0"
            time.sleep(0.02)
    sys.exit(Path(folder, "redis.log").read_text())


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as probe:
        probe.sendall(b"PING\r\n")
        return probe.recv(7) == b"+PONG\r\n"
    return False


def _start_worker(url: str, folder: str, started: list[subprocess.Popen[Any]]) -> None:
    command = f"celery -A demo.tasks worker -c {PROCESSES} --without-gossip --without-mingle"
    _start(
        [sys.executable, "-m", *command.split()],
        Path(folder, "worker.log"),
        started,
        DEMO_REDIS_URL=url,
    )


def _start(
    command: list[str], log: Path, started: list[subprocess.Popen[Any]], **environ: str
) -> subprocess.Popen[Any]:
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, "TMPDIR": str(log.parent), **environ},
            start_new_session=True,
        )
    started.append(process)
    return process


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and its children, gently if that can be had at once."""
    process.send_signal(signal.SIGQUIT)  # by SIGTERM, a worker would first end its tasks
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(2)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    keep(sys.argv[1])
