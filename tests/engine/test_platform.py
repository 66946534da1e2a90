"""Threads, forks and signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from celery_relock.backends.memory import MemoryBackend
from celery_relock.engine import engine, platform
from celery_relock.engine.platform import ForkGate, Pool, for_with, native_lock
from tests.support import wait_for


class Struck(Exception):
    """What somebody's signal handler raises."""


@pytest.fixture
def strikes() -> Iterator[list[bool]]:
    """Signals strike the main thread all the time, and raise while the list has something."""
    armed: list[bool] = []
    main, over, interval = threading.get_ident(), threading.Event(), sys.getswitchinterval()

    def handler(*_: object) -> None:
        if armed:
            raise Struck

    def shoot() -> None:
        while not over.is_set():
            signal.pthread_kill(main, signal.SIGUSR2)
            time.sleep(0)

    before, shooter = signal.signal(signal.SIGUSR2, handler), threading.Thread(target=shoot)
    sys.setswitchinterval(1e-5)
    shooter.start()
    yield armed
    over.set()
    shooter.join()
    sys.setswitchinterval(interval)
    signal.signal(signal.SIGUSR2, before)


def test_what_a_signal_handler_raises_leaves_no_lock_locked(strikes: list[bool]) -> None:
    raw = native_lock()
    lock, struck, until = for_with(raw), 0, time.monotonic() + 30
    while struck < 300 and time.monotonic() < until:
        try:
            strikes.append(True)
            for _ in range(1000):
                with lock:
                    pass
            strikes.clear()
        except Struck:
            struck += 1
        strikes.clear()
        assert not raw.locked()
    assert struck


def test_the_threads_of_a_pool_end_with_it_also_after_a_call_that_had_it() -> None:
    pool, both_are_there = Pool(2), threading.Barrier(2)

    def here() -> int:
        both_are_there.wait(30)
        return threading.get_native_id()

    threads = {call.result(30) for call in [pool.submit(here), pool.submit(here)]}
    assert len(threads - {threading.get_native_id()}) == 2
    assert pool.submit(lambda owner: owner is not None, pool).result()
    del pool
    live = Path("/proc/self/task")
    wait_for(lambda: not any((live / str(each)).exists() for each in threads), what="their end")


def test_the_threads_for_a_master_that_nobody_asks_any_more_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The masters of a cluster, each at an address that no other had."""
    monkeypatch.setattr(engine, "UNASKED", 0.2)
    backend, master, live = MemoryBackend(), 0, Path("/proc/self/task")
    monkeypatch.setattr(backend, "route", lambda _: master)
    locks, over = engine.Engine(backend), threading.Event()
    hangs = locks.pool_for("a").submit(over.wait, 30)
    busy, before, made = locks.pool_for("a"), set(live.iterdir()), []
    for master in range(1, 6):  # noqa: B007 - the route
        made += [locks.pool_for("a").submit(threading.get_native_id) for _ in range(4)]
        time.sleep(0.3)
    assert {call.result(10) for call in made}
    # Those of the last one, and of the one before it.
    wait_for(lambda: len(set(live.iterdir()) - before) <= 8, what="the end of the others")
    master = 0
    assert locks.pool_for("a") is busy
    over.set()
    assert hangs.result(10)


def test_a_pool_makes_do_with_the_threads_that_it_could_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system has no more of them to spare."""
    pool = Pool(4)
    pool.submit(int).result(10)

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(platform, "start_native_thread", refuse)
    assert pool.submit(int, "7").result(10) == 7
    with pytest.raises(RuntimeError):
        Pool(4).submit(int)


def test_a_call_that_a_signal_kept_from_a_pool_is_not_waited_for_when_the_process_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def put(_: object) -> None:
        raise Struck

    pool = Pool(1)
    pool.submit(int).result(10)
    monkeypatch.setattr(pool, "_calls", SimpleNamespace(put=put))
    with pytest.raises(Struck):
        pool.submit(int)
    assert not pool._open


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, on purpose
def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    is_in, over = threading.Event(), threading.Event()

    def notice() -> None:
        with platform._noticing:
            is_in.set()
            over.wait(30)

    thread = threading.Thread(target=notice)
    thread.start()
    assert is_in.wait(10)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        platform.notice_fork()
        os._exit(7)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> ForkGate:
    """A gate that is there for a test: hooks of a fork can never be taken back."""
    monkeypatch.setattr(platform.fork_gate, "_inside", {})
    monkeypatch.setattr(platform, "_FORK_WAITS", 60.0)
    return platform.fork_gate


def forked(*locks: threading.Lock) -> int:
    """How a child ends that takes these locks: 7 if it can."""
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        for lock in locks:
            lock.acquire()
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, on purpose
def test_a_fork_waits_for_those_inside_of_the_gate_and_they_for_the_fork(gate: ForkGate) -> None:
    is_in, first, second = threading.Event(), threading.Lock(), threading.Lock()

    def come_and_go() -> None:
        with gate.closed(), first:
            is_in.set()
            wait_for(gate._lock.locked, what="the fork to wait")
            later.start()
            time.sleep(0.1)  # in which the other one could come

    def come_late() -> None:
        with gate.closed(), second:
            is_over.wait(30)

    is_over = threading.Event()
    threads = threading.Thread(target=come_and_go), threading.Thread(target=come_late)
    _, later = threads
    threads[0].start()
    assert is_in.wait(10)
    assert forked(first, second) == 7
    wait_for(second.locked, what="the late one")
    is_over.set()
    for thread in threads:
        thread.join()
    assert forked(second) == 7
    assert not gate._inside


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, on purpose
def test_a_fork_waits_once_for_who_hangs_inside_of_the_gate(
    gate: ForkGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_in, is_over = threading.Event(), threading.Event()

    def hang() -> None:
        with gate.closed():
            is_in.set()
            is_over.wait(60)

    thread = threading.Thread(target=hang)
    thread.start()
    assert is_in.wait(10)
    monkeypatch.setattr(platform, "_FORK_WAITS", 0.1)
    assert forked() == 7
    assert not gate._inside
    is_over.set()
    thread.join()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, on purpose
def test_who_forks_inside_of_the_gate_does_not_wait_for_itself(gate: ForkGate) -> None:
    platform._FORK_WAITS = 0.1
    with gate.closed():
        with gate.closed():
            assert forked() == 7
        assert [*gate._inside] == [threading.get_ident()]  # nor is it taken for one that hangs
    assert not gate._inside
