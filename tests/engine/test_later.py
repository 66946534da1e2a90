"""What failed because Redis could not be reached is made up for when it can."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_relock.engine import crash
from celery_relock.engine import later as later_module
from celery_relock.engine.engine import Engine
from celery_relock.engine.later import Later
from celery_relock.engine.protocol import Parked, ParkRequest
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.worker.ending import end_unexecuted
from tests.support import programs, wait_for
from tests.support.proxy import Proxy
from tests.support.strikes import Stop, at_the_next_line, strike

MESSAGE = ParkRequest("its message", "home", "task")


def withdraw_later(engine: Engine, execution_id: str) -> None:
    engine.later.add(partial(engine.parking.withdraw, execution_id))


def test_executions_that_end_while_redis_is_away_leave_the_line_when_it_is_back(
    runs: Callable[..., Any], proxy: Proxy
) -> None:
    process, other = runs(proxy.url, socket_timeout=0.3), runs()
    holder = other.held("a")
    parked = [process.lease("a") for _ in range(3)]
    for lease in parked:
        assert isinstance(process.engine.park(lease, MESSAGE), Parked)
    proxy.refuse()
    for lease in parked:
        withdraw_later(process.engine, lease.claim.execution_id)
    assert other.engine.inspect("a").waiting == 3
    proxy.accept()
    wait_for(lambda: other.engine.inspect("a").waiting == 0, what="an empty line")
    other.release(holder)


def test_what_redis_refuses_keeps_back_nothing_else() -> None:
    def refused() -> None:
        raise LockConfigError("NOPERM")

    later, made = Later(), threading.Event()
    for _ in range(30):
        later.add(refused)
    later.add(made.set)
    assert made.wait(20)  # not after two seconds for each


def test_a_call_that_fails_for_another_reason_does_not_keep_back_those_behind_it(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> None:
    process, other = runs(), runs()
    holder, lease = other.held("a"), process.lease("a")
    process.engine.park(lease, MESSAGE)
    bad = process.lease("a").claim.execution_id
    client.hset(f"{namespace}:{{0}}:parked", bad, "of somebody else")
    client.set(f"{namespace}:{{0}}:l:of somebody else", "no lock")
    withdraw_later(process.engine, bad)
    withdraw_later(process.engine, lease.claim.execution_id)
    wait_for(lambda: other.engine.inspect("a").waiting == 0, what="an empty line")
    other.release(holder)


def test_a_call_that_fails_again_and_again_does_not_keep_back_one_for_another_node() -> None:
    later, is_away, made = Later(), threading.Event(), list[str]()
    is_away.set()

    def ask_the_dead_node() -> None:
        if is_away.is_set():
            raise LockUnavailable("it is away")
        made.append("late")

    later.add(ask_the_dead_node)
    later.add(partial(made.append, "at once"))
    wait_for(lambda: made == ["at once"])
    is_away.clear()
    wait_for(lambda: made == ["at once", "late"])


def test_a_flood_of_what_is_not_kept_is_told_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(later_module, "_MOST", 2)
    later, is_back = Later(), threading.Event()

    def ask_the_dead_node() -> None:
        if not is_back.is_set():
            raise LockUnavailable("it is away")

    for times in (1, 2):
        for _ in range(100):
            later.add(ask_the_dead_node)
        assert caplog.text.count("too much has failed without Redis") == times
        later._told_at -= 60.0
    is_back.set()
    wait_for(lambda: not later._calls)


def test_a_new_call_comes_before_those_that_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_module, "_AGAIN", 0.02)
    later, is_away, made = Later(), threading.Event(), list[str]()
    is_away.set()

    def ask_the_dead_node() -> None:
        made.append("dead")
        if is_away.is_set():
            raise LockUnavailable("it is away")

    for _ in range(20):
        later.add(ask_the_dead_node)
    wait_for(lambda: len(made) > 25)
    before = len(made)
    later.add(partial(made.append, "new"))
    wait_for(lambda: "new" in made)
    assert made.index("new") <= before + 2  # one was on its way
    is_away.clear()
    wait_for(lambda: not later._calls)


def test_a_call_for_which_no_thread_was_left_is_made_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later, made = Later(), list[str]()
    with monkeypatch.context() as none_to_spare:
        none_to_spare.setattr(threading.Thread, "start", _cannot_start)
        later.add(partial(made.append, "first"))
    assert not made
    later.add(partial(made.append, "second"))
    wait_for(lambda: made == ["first", "second"])
    wait_for(lambda: not later._thread.on)
    later.add(partial(made.append, "third"))
    wait_for(lambda: made[2:] == ["third"])


def test_a_call_is_made_wherever_a_signal_struck_when_another_was_added() -> None:
    seen, before = set[int](), -1
    while len(seen) > before:
        before = len(seen)
        later, made, traced = Later(), threading.Event(), sys.gettrace()
        sys.settrace(at_the_next_line(Later.add, seen, strike))
        try:
            with suppress(Stop):
                later.add(int)
        finally:
            sys.settrace(traced)
        later.add(made.set)
        assert made.wait(5), f"not after line {max(seen)} of {seen}"
    assert before > 3


def test_a_signal_handler_adds_a_call_in_the_middle_of_adding_another() -> None:
    seen, before, later, made = set[int](), -1, Later(), list[str]()

    def add() -> None:
        its = partial(later.add, partial(made.append, "its"))
        sys.settrace(at_the_next_line(Later.add, seen, its))
        later.add(lambda: made.append("another"))

    while len(seen) > before:
        before = len(seen)
        thread = threading.Thread(target=add, daemon=True)
        thread.start()
        thread.join(5)
        assert not thread.is_alive(), "each waits for the other"
    wait_for(lambda: (made.count("its"), made.count("another")) == (before, before + 1))
    assert before > 3


def _cannot_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_forked_child_withdraws_by_itself_while_its_parent_still_tries(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        from functools import partial
        from celery_relock.engine.protocol import ParkRequest, Parked
        from tests.support import wait_for
        from tests.support.proxy import Proxy
        from urllib.parse import urlsplit

        proxy = Proxy(urlsplit(URL).port)
        holder, first = engine(), engine(proxy.url)
        held(holder, "a", seconds=30.0)
        mine, own = lease(first, "a"), lease(first, "a")
        for each in (mine, own):
            assert isinstance(first.park(each, ParkRequest("text", "home", "task")), Parked)
        proxy.refuse()
        first.later.add(partial(first.parking.withdraw, mine.claim.execution_id))
        child = os.fork()
        if child == 0:
            first.backend.transport._work._options["port"] = urlsplit(URL).port
            first.later.add(partial(first.parking.withdraw, own.claim.execution_id))
            wait_for(lambda: engine().inspect("a").waiting == 1, what="the child's own")
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        proxy.accept()
        wait_for(lambda: holder.inspect("a").waiting == 0, what="the parent's own")
        say("done")
        """,
        redis_url,
        namespace,
    )
    assert said == ["done"]


def test_what_a_process_was_to_free_when_it_ended_is_freed_by_the_reaper_of_its_host(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = programs.run(
        """
        import logging, signal
        from urllib.parse import urlsplit
        from celery_relock.engine.crash import Reaper
        from celery_relock.engine.protocol import KEPT, Parked, ParkRequest, Successor
        from celery_relock.errors import LockConfigError, LockUnavailable
        from celery_relock.worker.ending import end_unexecuted, withdraw_later
        from tests.support.proxy import Proxy

        logging.disable()
        proxy = Proxy(urlsplit(URL).port)
        holder, back = held(engine(), "a", seconds=30.0), engine(proxy.url)
        asked, answer = os.pipe()
        child = os.fork()
        if child == 0:
            own, parked, kept = engine(proxy.url), [], []
            for _ in range(2):
                parked.append(lease(own, "a"))
                assert isinstance(own.park(parked[-1], ParkRequest("text", "home", "task")), Parked)
            for name in ("b", "c"):
                lasting = held(own, name, seconds=30.0)
                lasting.successor = Successor("next" + name, 60.0)
                own.release(lasting)
            os.write(answer, b"parked")
            while True:
                try:
                    own.inspect("a")
                    time.sleep(0.01)
                except LockUnavailable:
                    break
            withdraw_later(own, parked[0].claim.execution_id)
            end_unexecuted(own, ["b"], "nextb")
            os.kill(os.getpid(), signal.SIGKILL)
        os.read(asked, 6)
        proxy.refuse()
        os.waitpid(child, 0)
        reaper = Reaper(back.parking)
        reaper.look()
        proxy.accept()
        seen = engine()
        assert (seen.inspect("a").waiting, len(seen.inspect("b").holds)) == (2, 1)
        reaper.look()
        say(seen.inspect("a").waiting, len(seen.inspect("b").holds), len(seen.inspect("c").holds))
        """,
        redis_url,
        namespace,
    )
    assert said == ["1 0 1"]


def test_what_was_made_up_for_is_not_left_to_a_reaper(
    runs: Callable[..., Any],
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crash.tempfile, "gettempdir", lambda: str(tmp_path))
    journal = crash.Journal()
    monkeypatch.setattr(later_module, "journal", journal)

    def noted() -> list[crash.Entry]:
        return list(crash.read(crash.folder() / crash.process_name(os.getpid())))

    process = runs(proxy.url, socket_timeout=0.3)
    proxy.refuse()
    end_unexecuted(process.engine, ["a", "b"], "execution")
    assert [(each.execution_id, each.names) for each in noted()] == [("execution", ("a", "b"))]
    proxy.accept()
    wait_for(lambda: noted() == [], what="an empty journal")


def test_what_a_killed_process_was_to_withdraw_stays_if_its_message_came_again_and_was_parked(
    redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = programs.run(
        """
        import logging, signal
        from urllib.parse import urlsplit
        from celery_relock.engine.crash import Reaper
        from celery_relock.engine.protocol import Parked, ParkRequest
        from celery_relock.worker.ending import withdraw_later
        from tests.support.proxy import Proxy

        logging.disable()
        proxy, seen = Proxy(urlsplit(URL).port), engine()
        holder, back = held(seen, "a", seconds=30.0), engine(proxy.url)
        runs = "runs-without-its-lock", "fails-without-its-lock"
        proxy.refuse()
        child = os.fork()
        if child == 0:
            own = engine(proxy.url)
            mine, other = (lease(own, "a", execution_id=run).claim for run in runs)
            withdraw_later(own, mine.execution_id, 0.0, mine.attempt_id)  # its body may die
            withdraw_later(own, other.execution_id)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        for run in runs:
            again = lease(seen, "a", execution_id=run)
            assert isinstance(seen.park(again, ParkRequest("text", "home", run)), Parked)
        proxy.accept()
        Reaper(back.parking).look()
        say(seen.inspect("a").waiting, seen.backend.withdraw(runs[0], 60.0))
        """,
        redis_url,
        namespace,
    )
    assert said == ["1 True"]
