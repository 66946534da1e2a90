"""`lock_on_lost="raise"`: a body whose lock is lost is interrupted, once, and only inside."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_relock.engine import lease as lease_module
from celery_relock.engine.hold import Hold, Share
from celery_relock.engine.interrupt import Interruption
from celery_relock.engine.lease import Lease, State
from celery_relock.engine.platform import clock
from celery_relock.engine.protocol import Claim
from celery_relock.engine.renewal import keepalive
from celery_relock.errors import LockConfigError, LockLost


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """What is raised at random would be swallowed by a `__del__` of what earlier tests left."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def lost_soon(
    runs: Callable[..., Any], client: redis.Redis, namespace: str
) -> Callable[..., Interruption]:
    """An interruption for a real hold that somebody has deleted: its next renewal finds out."""

    def make(name: str = "a") -> Interruption:
        lease = runs().held(name, lease=1.2)
        client.delete(f"{namespace}:{{0}}:l:{name}")
        return Interruption(lease, lambda: LockLost(f"{name} is lost", name=name))

    return make


def in_thread(body: Callable[[], Any]) -> Any:
    """What a body returns, or the exception that it ends with, in a thread of its own."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(body())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert outcome, "the body goes on and on"
    return outcome[0]


def compute(seconds: float) -> int:
    until, steps = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        steps += 1
    return steps


def receive(seconds: float) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(seconds)
        here.recv(1)


def wait_for_event(seconds: float) -> None:
    threading.Event().wait(seconds)


@pytest.mark.parametrize("work", [time.sleep, receive, compute, wait_for_event])
def test_the_main_thread_is_interrupted_wherever_it_is(
    work: Callable[[float], Any], lost_soon: Callable[..., Interruption]
) -> None:
    start = time.monotonic()
    with pytest.raises(LockLost, match="a is lost") as raised, lost_soon():
        work(30.0)
    assert time.monotonic() - start < 20
    assert type(raised.value) is LockLost


def test_in_another_thread_it_is_refused_when_it_is_asked_for(
    lost_soon: Callable[..., Interruption],
) -> None:
    ran = []

    def body() -> None:
        with lost_soon():
            ran.append("body")

    error = in_thread(body)
    assert type(error) is LockConfigError
    assert "main thread" in str(error)
    assert not ran


def test_a_loss_that_was_found_before_the_body_begins_is_raised_at_once(
    runs: Callable[..., Any],
) -> None:
    lease = runs().held("a")
    keepalive.lose(lease, "for a test")
    ran = []
    with pytest.raises(LockLost), Interruption(lease, lambda: LockLost("gone")):
        ran.append("body")
    assert not ran


def test_the_body_may_catch_it_and_is_not_interrupted_again(
    lost_soon: Callable[..., Interruption],
) -> None:
    caught = 0
    interruption = lost_soon()
    with interruption:
        for _ in range(3):
            try:
                time.sleep(1.0)
            except LockLost:
                caught += 1
                interruption.fire()
    assert caught == 1


def bare_lease() -> Lease:
    """A hold that no server knows, for what only matters on this side."""
    claim = Claim("execution", "attempt", "owner", ("a",), (1,), 30.0)
    lease = Lease(claim, backend=None)  # type: ignore[arg-type]
    lease.state, lease.deadline = State.HELD, clock() + 30
    return lease


def spin() -> None:
    until = time.perf_counter() + random.uniform(0, 0.0005)
    while time.perf_counter() < until:
        pass


def fired_at_random(rounds: int) -> tuple[int, int, list[BaseException]]:
    """Fire at short bodies around their end. Returns how many heard of it, how many did not, and
    whatever was raised after the body."""
    heard = unheard = 0
    stray: list[BaseException] = []
    ready, done = threading.Semaphore(0), threading.Semaphore(0)
    todo: list[Interruption | None] = []

    def fire() -> None:
        while True:
            ready.acquire()
            if (interruption := todo.pop()) is None:
                return
            spin()
            interruption.fire()
            done.release()

    shooter = threading.Thread(target=fire)
    shooter.start()
    for _ in range(rounds):
        interruption = Interruption(bare_lease(), lambda: LockLost("lost"))
        todo.append(interruption)
        ready.release()
        try:
            try:
                with interruption:
                    spin()
                unheard += 1
            except LockLost:
                heard += 1
            for _ in range(2000):  # after the body: nothing may come here
                pass
            done.acquire()
            sum(n for n in range(10))
        except BaseException as error:
            stray.append(error)
            done.acquire()
    todo.append(None)
    ready.release()
    shooter.join()
    return heard, unheard, stray


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns after microseconds, so that they meet at every point."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_nothing_is_raised_after_a_body_of_the_main_thread() -> None:
    heard, unheard, stray = fired_at_random(2000)
    assert heard
    assert unheard
    assert not stray


class Tracer:
    """Fires at the nth instruction of the end of a body, of which there are `count`."""

    def __init__(self, interruption: Interruption, nth: int) -> None:
        self._interruption, self._nth = interruption, nth
        self.count = 0

    def __call__(self, frame: Any, event: str, argument: object) -> Any:
        name, first = frame.f_code.co_name, frame.f_locals.get("self")
        if first is not self._interruption or name not in ("__exit__", "_leave"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self._nth:
                shooter = threading.Thread(target=self._interruption.fire)
                shooter.start()
                shooter.join(0.05)  # it may have to wait for a lock that this thread has
        return self


def fire_at(nth: int) -> tuple[str, int]:
    """How a body ends whose lock is lost at the nth instruction of its end; how many there are."""
    interruption = Interruption(bare_lease(), lambda: LockLost("lost"))
    tracer, before = Tracer(interruption, nth), sys.gettrace()
    try:
        with interruption:
            sys.settrace(tracer)
        outcome = "to the end"
    except LockLost:
        outcome = "raised"
    finally:
        sys.settrace(before)
    compute(0.001)  # nothing may come here
    return outcome, tracer.count


def fire_at_each() -> list[str]:
    _, count = fire_at(0)
    return [fire_at(nth)[0] for nth in range(1, count + 1)]


def test_a_loss_at_any_instruction_of_the_end_leaves_the_outcome_of_the_body() -> None:
    first, *later = fire_at_each()
    # At the first one nothing of ours has run yet: that is still the body.
    assert first in ("raised", "to the end")
    assert len(later) > 30
    assert set(later) == {"to the end"}


def nested(strike: Callable[[Interruption, Interruption], None]) -> list[str]:
    """Two bodies, both lost at once; the outer one goes on after its part has failed."""
    heard = []
    outer = Interruption(bare_lease(), lambda: LockLost("outer"))
    inner = Interruption(bare_lease(), lambda: LockLost("inner"))
    try:
        with outer:
            try:
                with inner:
                    strike(inner, outer)
                    compute(2.0)
            except LockLost as error:
                heard.append(error.reason)
            compute(2.0)
    except LockLost as error:
        heard.append(error.reason)
    compute(0.05)
    return heard


def test_of_two_bodies_of_the_main_thread_the_outer_hears_of_its_loss_though_signals_merge() -> (
    None
):
    def strike(*both: Interruption) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
        for each in both:
            each.fire()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])

    heard = nested(strike)
    assert heard[-1:] == ["outer"]
    assert heard.count("outer") == 1


def test_news_for_the_outer_body_that_arrive_as_the_inner_one_ends_reach_the_outer_one(
    runs: Callable[..., Any],
) -> None:
    outer = Interruption(runs().held("outer"), lambda: LockLost("outer", name="outer"))
    inner = Interruption(runs().held("inner"), lambda: LockLost("inner", name="inner"))

    def body() -> str:
        try:
            with outer:
                with inner:
                    shooter = threading.Thread(target=outer.fire)
                    try:
                        shooter.start()
                        compute(5.0)
                    except LockLost as error:
                        return f"{error.name} while the inner one ran"
                return "nothing"
        except LockLost as error:
            return str(error.name)

    assert body() == "outer while the inner one ran"


def test_each_body_under_one_lease_hears_of_its_loss_in_whatever_order_they_end(
    runs: Callable[..., Any],
) -> None:
    lease = runs().held("a", lease=30.0)
    first, second = (Interruption(lease, lambda: LockLost("lost")) for _ in range(2))

    def body() -> None:
        first.__enter__()
        with second:
            first.__exit__(None, None, None)
            threading.Thread(target=keepalive.lose, args=(lease, "for a test")).start()
            compute(5.0)

    with pytest.raises(LockLost):
        body()
    assert lease.on_lost == ()


def test_the_handler_that_somebody_has_for_the_signal_is_still_called() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGURG, lambda number, frame: heard.append(number))
    try:
        lease = bare_lease()
        for _ in range(2):
            with Interruption(lease, lambda: LockLost("lost")):
                os.kill(os.getpid(), signal.SIGURG)  # a stranger's: the body goes on
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGURG)
        time.sleep(0.01)
        assert heard == [signal.SIGURG] * 3
        ours = signal.getsignal(signal.SIGURG)

        def chained(number: int, frame: Any) -> None:
            heard.append(-number)
            assert callable(ours)
            ours(number, frame)

        signal.signal(signal.SIGURG, chained)  # a handler that calls the one it replaced
        with Interruption(lease, lambda: LockLost("lost")):
            os.kill(os.getpid(), signal.SIGURG)
            time.sleep(0.01)
        assert heard[3:] == [-signal.SIGURG]
    finally:
        signal.signal(signal.SIGURG, before)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_leaves_the_body_in_peace(runs: Callable[..., Any]) -> None:
    lease = runs().held("a", lease=30.0)
    with Interruption(lease, lambda: LockLost("lost")):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with Interruption(lease, lambda: LockLost("not the child's")):
                    code = 2
            except LockLost:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        time.sleep(0.1)


def test_a_signal_that_strikes_where_the_state_of_a_lease_is_being_read_stops_nothing() -> None:
    lease = bare_lease()
    hold = Hold("owner", [Share("a", lease, 1, False)])
    interruption = Interruption(lease, hold.lost_error)

    def be_struck() -> None:
        with interruption, lease_module._guard.lock:
            lease.state = State.LOST
            interruption.fire()
            compute(1.0)

    with pytest.raises(LockLost, match="'a'"):
        be_struck()
