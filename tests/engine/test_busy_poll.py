"""A thread looks out for an answer for a moment, where that helps, and nothing is lost by it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_relock.engine.protocol import Held
from celery_relock.store import busy_poll
from celery_relock.store.busy_poll import BusyPoll
from tests.engine.conftest import Runs
from tests.engine.test_green import both
from tests.support import RedisServer, programs, wait_for
from tests.support.proxy import Proxy


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def closed() -> socket.socket:
    """Whoever looks at it fails."""
    sock = socket.socket()
    sock.close()
    return sock


def looks(poll: BusyPoll, closed: socket.socket) -> bool:
    try:
        poll.wait(closed)
    except ValueError:
        return True
    return False


def test_who_looks_out_sees_what_comes_meanwhile(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    monkeypatch.setattr(busy_poll, "_MOMENT", 60.0)
    timer = threading.Timer(0.05, theirs.send, [b"answer"])
    timer.start()
    BusyPoll().wait(ours)
    assert ours.recv(10, socket.MSG_DONTWAIT) == b"answer"
    timer.join()


def test_it_is_tried_again_after_a_pause_until_an_answer_comes_in_time(
    pair: tuple[socket.socket, socket.socket],
    closed: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = pair
    poll = BusyPoll()
    for _ in range(busy_poll._LATE):
        assert looks(poll, closed)
        poll.wait(ours)
    wait_for(lambda: looks(poll, closed), timeout=5, what="a look after the pause")
    # One more late answer, and it is over again; one in time, and it is as before.
    monkeypatch.setattr(busy_poll, "_PAUSE", 60.0)
    poll.wait(ours)
    assert not looks(poll, closed)
    poll._again_at = 0.0
    theirs.send(b"answer")
    poll.wait(ours)
    ours.recv(10)
    poll.wait(ours)
    assert looks(poll, closed)


def test_where_answers_come_late_nobody_looks_out(
    pair: tuple[socket.socket, socket.socket],
    closed: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(busy_poll, "_PAUSE", 60.0)
    poll = BusyPoll()
    for _ in range(busy_poll._LATE):
        assert looks(poll, closed)
        poll.wait(pair[0])
    assert not looks(poll, closed)


def test_threads_beside_the_main_one_do_not_look_out(
    closed: socket.socket, in_thread: Callable[[Callable[[], Any]], Any]
) -> None:
    assert looks(BusyPoll(), closed)
    assert not in_thread(lambda: looks(BusyPoll(), closed))


@both
def test_greenlets_do_not_look_out(green: str, redis_url: str, namespace: str) -> None:
    program = """
        import socket
        from celery_relock.store.busy_poll import BusyPoll
        sock = socket.socket()
        sock.close()
        BusyPoll().wait(sock)
        say("slept")
    """
    assert programs.run(program, redis_url, namespace, first=green) == ["slept"]


@pytest.mark.parametrize("patched", ["thread=False", "all=False, select=True, socket=True"])
def test_a_lock_is_taken_where_eventlet_has_left_the_threads_as_they_are(
    patched: str, redis_url: str, namespace: str
) -> None:
    """It takes `select.poll` away."""
    first = f"""
        import warnings; warnings.simplefilter("ignore")
        import eventlet; eventlet.monkey_patch({patched})
    """
    program = """
        one = engine()
        for _ in range(2):
            assert one.release(held(one, "a"))
        say("done")
    """
    assert programs.run(program, redis_url, namespace, first=first) == ["done"]


class Interrupted(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[Callable[[float], None]]:
    """Ring in so many seconds: then `Interrupted` is raised in the main thread."""

    def ring(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_in_the_middle_of_it_leaves_nothing_behind(
    runs: Callable[..., Runs],
    own_redis: Callable[..., RedisServer],
    alarm: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer of the one is not taken for that of the next."""
    server = own_redis()
    one = runs(server.url)
    assert one.release(one.held("a"))
    monkeypatch.setattr(busy_poll, "_MOMENT", 60.0)
    lease = one.lease("a")
    server.pause()
    alarm(0.1)
    with pytest.raises(Interrupted):
        one.engine.acquire(lease)
    server.resume()
    assert one.release(lease)
    after = one.held("b")
    assert [hold.execution_id for hold in one.engine.inspect("b").holds] == [
        after.claim.execution_id
    ]
    assert one.engine.inspect("a").holds == ()
    assert one.release(after)


def test_an_answer_that_is_lost_while_it_is_looked_out_for_is_asked_for_again(
    runs: Callable[..., Runs], proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_poll, "_MOMENT", 60.0)
    one = runs(proxy.url)
    assert one.release(one.held("a"))
    proxy.lose_reply()
    lease = one.lease("a")
    answer = one.engine.acquire(lease)
    assert isinstance(answer, Held)
    assert answer.repeated
    assert one.release(lease)
