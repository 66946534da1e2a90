"""Python programs in processes of their own: for forks, endings and monkey-patching."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.support import reaper

ROOT = Path(__file__).parents[2]

_UNRENEWED = re.compile(
    r"^renewing leases failed, trying again: .*(no answer within|Timeout reading).*\n", re.MULTILINE
)

_started: list[subprocess.Popen[str]] = []

#: `first` of a program under gevent.
GEVENT = """
from gevent import monkey; monkey.patch_all()
import gevent, logging
logging.disable()
def spawn(call, *args): return gevent.spawn(call, *args)
def join(one): return one.get(timeout=30)
"""

# What every program starts with: `engine`, `lease(name, seconds)`, `ready`, `say`, `threads()` and
# `fork_by_c()`.
_START = """
import os, sys, threading, time
URL, NAMESPACE = sys.argv[1:3]

def engine(url=URL):
    from celery_relock.engine.engine import Engine
    from celery_relock.backends.redis.backend import RedisBackend
    from celery_relock.backends.redis.urls import transport_for_url
    return Engine(RedisBackend(transport_for_url(url), NAMESPACE))

def lease(engine, *names, seconds=2.0, execution_id=None, owner=None, **more):
    from celery_relock.engine import ids
    from celery_relock.engine.protocol import Claim
    run = execution_id or ids.new_id()
    limits = (1,) * len(names)
    asked = Claim(run, ids.new_attempt_id(), owner or run, names, limits, seconds, **more)
    return engine.lease(asked)

def held(engine, *names, wait=0.0, **more):
    from celery_relock.engine.protocol import Held
    taken = lease(engine, *names, **more)
    answer = engine.acquire(taken, wait)
    assert isinstance(answer, Held), answer
    return taken

def ready(engine):
    from celery_relock.engine.wakeup import OPENING
    bell = threading.Event()
    with engine.inbox.opening(bell.set) as tried:
        tried() or bell.wait(OPENING)

def say(*words):
    print(*words, flush=True)

def threads():
    return len(os.listdir("/proc/self/task"))

def _switches():
    each = [open(f"/proc/self/task/{n}/status") for n in os.listdir("/proc/self/task")
            if int(n) != threading.get_native_id()]
    return [[line for line in told if "ctxt" in line] for told in each]

def fork_by_c():
    # Once the other threads stand still: Python hangs in the child if one waits for the GIL.
    import ctypes
    seen = None
    while seen != (seen := _switches()):
        time.sleep(0.05)
    return ctypes.PyDLL(None).fork()
"""


# What Python 3.12 and later say of a fork beside a thread: these programs fork on purpose.
_FORKS = ("-W", "ignore:This process:DeprecationWarning")


def start(program: str, url: str, namespace: str, *, first: str = "") -> subprocess.Popen[str]:
    """Start a program. `first` comes before everything: the place for monkey-patching."""
    source = "\n".join([textwrap.dedent(first), _START, textwrap.dedent(program)])
    process: subprocess.Popen[Any] = reaper.start(
        [sys.executable, "-X", "faulthandler", *_FORKS, "-c", source, url, namespace],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


def end_all() -> None:
    """End what a test has started and not finished, because it failed."""
    while _started:
        with _started.pop() as process:  # closes its pipes
            reaper.end(process)


def finish(process: subprocess.Popen[str], *, code: int = 0, timeout: float = 40.0) -> list[str]:
    """The lines that a program has said. It must end in time, by itself, with nothing on stderr,
    except that a busy machine may have kept Redis from answering a renewal in time."""
    try:
        said, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(6)  # faulthandler shows where it hangs
        said, errors = process.communicate(timeout=10)
        raise AssertionError(f"the program hangs; said:\n{said}\n{errors}") from None
    finally:
        reaper.end(process)
    assert process.returncode == code, f"ended with {process.returncode}; said:\n{said}\n{errors}"
    errors = re.sub(_UNRENEWED, "", errors)
    assert errors == "", f"said:\n{said}\nerrors:\n{errors}"
    return said.splitlines()


def run(program: str, url: str, namespace: str, **options: Any) -> list[str]:
    """Start a program and return the lines that it said, see `start` and `finish`."""
    first = options.pop("first", "")
    return finish(start(program, url, namespace, first=first), **options)


def said_by(code: str, *arguments: str) -> str:
    """What an interpreter says that has loaded nothing but this code; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
