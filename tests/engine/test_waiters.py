"""Blocking waiters: first come, first served; the dead cost nothing, the frozen one lease."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import redis

from celery_relock.engine import lease as lease_module
from celery_relock.engine import wakeup
from celery_relock.engine.lease import Lease, State
from celery_relock.engine.protocol import Conflict, Held
from tests.support import RedisServer, leftovers, programs, wait_for
from tests.support.companion import Companion, running
from tests.support.proxy import Proxy
from tests.support.runs import Runs

WAITERS = """
from celery_relock.engine import lease as lease_module
lease_module.WAITER_LEASE = {place}
here = engine()
ready(here)
def wait():
    held(here, "a", wait=None, seconds={lease})
    say("in")
for _ in range({each}):
    threading.Thread(target=wait, daemon=True).start()
input()
"""


class Waiter:
    """A thread that acquires a lock and keeps it until it is told to release it."""

    def __init__(self, runs: Runs, name: str = "a", wait: float | None = 60.0, **claim: object):
        self.runs = runs
        self.lease: Lease = runs.lease(name, **claim)
        self.wait = wait
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.error: BaseException | None = None
        self.answer: object = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.answer = self.runs.engine.acquire(self.lease, self.wait)
            self.remaining = self.lease.remaining
            if isinstance(self.answer, Held):
                self.entered.set()
                self.leave.wait(60)
        except BaseException as error:
            self.error = error
        finally:
            self.runs.release(self.lease)

    def start(self) -> Waiter:
        """Start, and return when it stands in line."""
        self.thread.start()
        wait_for(lambda: self.lease.state in (State.WAITING, State.HELD), what="a place in line")
        return self

    def finish(self) -> None:
        self.leave.set()
        self.thread.join(30)
        assert not self.thread.is_alive()


@contextmanager
def waiting(
    url: str,
    namespace: str,
    count: int,
    lease: float,
    each: int = 1,
    place: float = lease_module.WAITER_LEASE,
) -> Iterator[list[Companion]]:
    """So many processes, each with so many threads that want the lock."""
    program = WAITERS.format(lease=lease, each=each, place=place)
    with ExitStack() as stack:
        yield [stack.enter_context(running(program, url, namespace)) for _ in range(count)]


@pytest.fixture
def rare_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter with a lease of 30 s looks for itself after 10 s: what it finds sooner, it has been
    told."""
    monkeypatch.setattr(lease_module, "WAITER_LEASE", 60.0)


def queued(runs: Runs, count: int) -> None:
    wait_for(lambda: runs.engine.inspect("a").waiting == count, what=f"{count} waiters")


def test_waiters_acquire_in_their_order_of_arrival(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    processes = [runs(), runs()]
    holder = processes[0].held("a")
    waiters = [Waiter(random.choice(processes)).start() for _ in range(6)]
    processes[0].release(holder)
    for index, waiter in enumerate(waiters):
        assert waiter.entered.wait(30)
        assert not any(later.entered.is_set() for later in waiters[index + 1 :])
        waiter.finish()
    fences = [waiter.answer.fences[0] for waiter in waiters]  # type: ignore[attr-defined]
    assert fences == sorted(fences)
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


@pytest.mark.parametrize(
    ("count", "kind"), [(2, ""), (8, ""), (32, ""), (8, "by_owner"), (8, "renews")]
)
def test_a_contended_cycle_costs_three_commands_at_the_most(
    count: int, kind: str, runs: Callable[..., Runs], own_redis: Callable[..., RedisServer]
) -> None:
    """Also of claims whose grant does not say all: which entry it is, or that nobody renews it."""
    server = own_redis()
    one = runs(server.url)
    one.ready()
    cycles = 15
    order: list[int] = []

    def begin() -> Lease:
        lease = one.lease("a", by_owner=kind == "by_owner")
        lease.renews = kind != "renews"
        return lease

    at_work = {me: begin() for me in range(count)}

    def work(me: int) -> None:
        for turn in range(cycles):
            lease = at_work[me]
            assert isinstance(one.engine.acquire(lease, 60.0), Held)
            order.append(me)
            # All others are in line, also whoever has just been in, before it is released.
            until = time.monotonic() + 30
            while [each.state for each in at_work.copy().values()].count(State.WAITING) < (
                len(at_work) - 1
            ):
                assert time.monotonic() < until
                time.sleep(0.001)
            if turn < cycles - 1:
                at_work[me] = begin()
            else:
                del at_work[me]
            one.release(lease)

    one.release(one.held("a"))
    workers = [threading.Thread(target=work, args=(me,)) for me in range(count)]
    with server.client() as client:
        before = client.info("stats")["total_reads_processed"]
        started = time.monotonic()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        took = time.monotonic() - started
        sent = client.info("stats")["total_reads_processed"] - before
    # On top come the connections; one heartbeat of the process now and then, however many wait; and
    # each asks twice at first, as it does not hear yet.
    assert sent <= 3 * count * cycles + 6 * count + 3 * took
    assert len(order) == count * cycles
    # In the middle, when all are there: in turn.
    middle = order[len(order) // 3 : 2 * len(order) // 3]
    shares = [middle.count(me) for me in range(count)]
    assert max(shares) - min(shares) <= 2, shares


@pytest.fixture
def share_a_core_with() -> Iterator[Callable[[RedisServer], None]]:
    """From now on this thread and a server have one core."""
    before = os.sched_getaffinity(0)

    def share(server: RedisServer) -> None:
        for process in (server.pid, 0):
            os.sched_setaffinity(process, {min(before)})

    yield share
    os.sched_setaffinity(0, before)


def test_the_next_waiter_hears_before_the_holder_that_waited_too(
    runs: Callable[..., Runs],
    own_redis: Callable[..., RedisServer],
    share_a_core_with: Callable[[RedisServer], None],
) -> None:
    """Else, beside the server, the former holder runs first, on the core that the server needs to
    tell the next one."""
    server = own_redis()
    one, other = runs(server.url), runs(server.url)
    for each in (one, other):
        each.ready()
    share_a_core_with(server)
    inbox = one.engine.backend.keys.inbox(other.engine.inbox.name, 0)  # type: ignore[attr-defined]
    with server.client() as client, client.pubsub(ignore_subscribe_messages=True) as ear:
        ear.subscribe(inbox)
        ear.get_message(timeout=10)
        for _ in range(30):
            holder = one.held("a")
            former = Waiter(other).start()
            one.release(holder)
            assert former.entered.wait(30)
            assert ear.get_message(timeout=10)["data"] == b""  # it asks who listens
            assert ear.get_message(timeout=10)["data"].startswith(b"granted ")
            following = Waiter(other).start()
            other.release(former.lease)
            assert ear.get_message(timeout=0)["data"] == b""
            assert ear.get_message(timeout=0)["data"].startswith(b"granted ")
            former.finish()
            following.finish()


def test_a_newcomer_does_not_overtake_whoever_waits(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    holder = one.held("a", lease=20.0)
    first = Waiter(one).start()
    seen: list[object] = []

    def barge() -> None:
        while not first.entered.is_set():
            lease = two.lease("a")
            seen.append(two.engine.acquire(lease))
            two.release(lease)

    bargers = [threading.Thread(target=barge) for _ in range(2)]
    for barger in bargers:
        barger.start()
    wait_for(lambda: len(seen) > 20)
    one.release(holder)
    for barger in bargers:
        barger.join(30)
    assert first.entered.is_set()
    assert all(isinstance(answer, Conflict) for answer in seen)
    first.finish()


def test_re_entry_never_queues(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    outer = one.held("a", owner="flow")
    waiter = Waiter(two).start()
    inner = one.held("a", owner="flow", ancestors=(outer.claim.execution_id,))
    assert (inner.fences, inner.reentered) == (outer.fences, (True,))
    one.release(outer)
    assert not waiter.entered.wait(0.1)
    one.release(inner)
    assert waiter.entered.wait(30)
    waiter.finish()


def test_a_waiter_that_joins_its_owners_permit_has_its_fence(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    first = Waiter(one, owner="flow", by_owner=True).start()
    stranger = Waiter(two).start()
    second = Waiter(two, owner="flow", by_owner=True).start()
    one.release(holder)
    assert first.entered.wait(30)
    assert second.entered.wait(30)
    assert first.lease.fences == second.lease.fences
    assert second.lease.reentered == (True,)
    assert not stranger.entered.is_set()
    first.finish()
    second.finish()
    assert stranger.entered.wait(30)
    stranger.finish()


def test_a_waiter_out_of_time_leaves_nothing(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str, rare_heartbeats: None
) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    started = time.monotonic()
    lease = two.lease("a")
    answer = two.engine.acquire(lease, 0.3)
    assert 0.3 <= time.monotonic() - started < 8
    assert isinstance(answer, Conflict)
    assert answer.owner == holder.claim.owner
    assert two.release(lease)
    assert two.engine.inspect("a").waiting == 0
    one.release(holder)
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


def test_a_grant_that_crosses_the_end_of_the_wait_leaves_nothing(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one, two = runs(), runs()
    one.ready()
    two.ready()
    for _ in range(60):
        holder = one.held("a")
        waiter = Waiter(two, wait=0.02)
        waiter.thread.start()
        time.sleep(0.02 + random.uniform(-0.004, 0.004))  # the race itself: the grant near the end
        one.release(holder)
        waiter.finish()
        assert waiter.error is None
        assert one.engine.inspect("a") == ((), 0)
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


class Stop(BaseException):
    """What a time limit or Ctrl-C throws in."""


def test_a_waiter_that_an_exception_from_outside_ends_leaves_nothing(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    waiter = Waiter(two, lease=1.0).start()
    thread = ctypes.c_ulong(waiter.thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Stop))
    waiter.thread.join(30)
    assert isinstance(waiter.error, Stop)
    assert one.engine.inspect("a").waiting == 0
    one.release(holder)
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


# What strikes in a destructor is swallowed by Python, and a socket it was about to keep stays open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_may_strike_at_any_line_of_acquire_and_release(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    """Hundreds of timers that go off in the middle: no hold and no place is ever left behind."""
    one, two = runs(), runs()
    armed = False

    def strike(*_: object) -> None:
        if armed:
            raise Stop

    before = signal.signal(signal.SIGALRM, strike)
    one.ready()
    struck = 0
    try:
        # Where a pair takes half a millisecond, half of them are over before the timer goes off.
        for turn in range(500):
            if struck == 25:
                break
            holder = two.held("a") if turn % 3 == 0 else None
            lease = one.lease("a")
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
            try:
                armed = True
                try:
                    one.engine.acquire(lease, 0.01)
                    one.engine.release(lease)
                finally:
                    armed = False
            except Stop:
                struck += 1
            one.release(lease)
            if holder is not None:
                two.release(holder)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert one.engine.inspect("a") == ((), 0), turn
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck == 25
    kept = [key for key in leftovers(client, namespace) if not key.endswith(":meta")]
    assert all(":d:" in key and 0 < client.pttl(key) <= 60_000 for key in kept)


def test_twenty_waiters_of_a_killed_process_at_the_head_are_skipped_at_once(
    runs: Callable[..., Runs], redis_url: str, namespace: str, client: redis.Redis
) -> None:
    one, two = runs(), runs()
    one.ready()
    two.ready()
    inboxes = partial(client.pubsub_channels, f"{namespace}:*:i:*")
    of_the_living = {*inboxes()}
    holder = one.held("a")
    with waiting(redis_url, namespace, count=1, lease=30.0, each=20, place=60.0) as (doomed,):
        queued(one, 20)
        waiter = Waiter(two).start()
        doomed.kill()
        # A server that has not seen yet that its connection is closed would let one of them in.
        wait_for(lambda: {*inboxes()} == of_the_living)
        started = time.monotonic()
        one.release(holder)
        assert waiter.entered.wait(30)
        # And not when their places have lapsed, after 20 s at least.
        assert time.monotonic() - started < 8
        waiter.finish()
    # Their places are dropped by whoever looks after they have lapsed, and have a TTL besides.
    for key in leftovers(client, namespace):
        assert key.endswith(":meta") or 0 < client.pttl(key) <= 90_000


def test_frozen_waiters_cost_one_waiters_lease_in_all(
    runs: Callable[..., Runs], redis_url: str, namespace: str
) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    with waiting(redis_url, namespace, count=3, lease=1.0, each=4) as frozen:
        queued(one, 12)
        waiter = Waiter(two, lease=1.0).start()
        for program in frozen:
            program.freeze()
        started = time.monotonic()
        one.release(holder)
        assert waiter.entered.wait(30)
        assert time.monotonic() - started < 8  # one lease of 1 s, and not twelve
        assert one.engine.inspect("a").waiting == 0
        waiter.finish()


def test_a_waiter_that_was_frozen_asks_again_and_keeps_nothing_it_lost(
    runs: Callable[..., Runs], redis_url: str, namespace: str
) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    with waiting(redis_url, namespace, count=1, lease=0.6) as (program,):
        queued(one, 1)
        program.freeze()
        one.release(holder)  # to the frozen one
        second = two.held("a", wait=30.0)
        program.resume()
        queued(one, 1)
        assert [hold.execution_id for hold in one.engine.inspect("a").holds] == [
            second.claim.execution_id
        ]
        two.release(second)
        assert program.line() == "in"
        held = one.engine.inspect("a").holds
        assert len(held) == 1
        assert held[0].fence > second.fences[0]


def test_a_lost_wake_up_is_found_by_the_next_heartbeat(
    proxy: Proxy, runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "WAITER_LEASE", 1.2)  # a heartbeat every 0.4 s
    near, far = runs(proxy.url), runs()
    holder = far.held("a")
    waiter = Waiter(near, lease=60.0).start()
    proxy.deaf = True
    started = time.monotonic()
    far.release(holder)
    assert waiter.entered.wait(30)
    assert time.monotonic() - started < 15  # and not when the lease that it was granted ends
    waiter.finish()


def test_a_late_copy_of_the_confirmation_of_a_grant_holds_the_lock_for_nobody(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url, socket_timeout=0.5), runs()
    near.ready()
    near.release(near.held("warm"))
    holder = far.held("a")
    copy = proxy.hold("acquire", after=1)  # the first is the one that waits
    waiter = Waiter(near, by_owner=True).start()
    far.release(holder)
    assert waiter.entered.wait(30)
    waiter.finish()
    copy.deliver()
    assert not far.engine.inspect("a").holds


def test_what_a_signal_raises_in_a_wait_is_not_lost(
    namespace: str,
) -> None:
    """Of `threading.Event.wait` one in a thousand became a RuntimeError (CPython 3.11)."""
    program = """
        import random, signal

        class Strike(BaseException):
            pass

        def strike(*_):
            raise Strike

        here = engine()
        signal.signal(signal.SIGALRM, strike)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            waiter = lease(here, "a")
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 9e-5))
                while True:
                    waiter.sleep(1e-6, lambda: False)
            except Strike:
                pass
        say("none lost")
    """
    assert programs.run(program, "redis://localhost", namespace) == ["none lost"]


def test_the_first_subscription_takes_no_longer_than_the_wait_itself(
    proxy: Proxy, runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wakeup, "OPENING", 3600.0)
    near, far = runs(proxy.url), runs()
    holder = far.held("a")
    proxy.hold("SUBSCRIBE")
    waiter = Waiter(near, wait=0.2)
    waiter.thread.start()
    waiter.thread.join(30)
    assert isinstance(waiter.answer, Conflict)
    assert not near.engine.inbox.listening.tried, "the subscription was given up first"
    far.release(holder)


def test_who_acquires_when_no_heartbeat_was_answered_for_long_has_a_whole_lease(
    runs: Callable[..., Runs],
) -> None:
    near, far = runs(), runs()
    near.ready()
    holder = far.held("a")
    waiter = Waiter(near, lease=300.0).start()
    waiter.lease.renewed -= 280  # as if the last one had been so long ago
    far.release(holder)
    assert waiter.entered.wait(30)
    assert waiter.remaining > 200
    waiter.finish()


def test_a_wake_up_while_the_inbox_was_cut_off_is_found_when_it_is_back(
    proxy: Proxy, runs: Callable[..., Runs]
) -> None:
    near, far = runs(proxy.url), runs()
    holder = far.held("a")
    waiter = Waiter(near).start()
    waiter.lease.due += 60  # no heartbeat of its own finds the grant
    proxy.refuse()
    far.release(holder)
    assert far.engine.inspect("a").waiting == 1
    proxy.accept()
    assert waiter.entered.wait(30)
    waiter.finish()


def test_a_grant_that_overtakes_the_answer_is_heard_at_once(
    runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch, rare_heartbeats: None
) -> None:
    one, two = runs(), runs()
    two.ready()
    holder = one.held("a")
    acquire = two.engine.backend.acquire

    def slow_answer(*arguments: object, **options: object) -> object:
        answer = acquire(*arguments, **options)  # type: ignore[arg-type]
        one.release(holder)
        time.sleep(0.1)  # the message of the grant comes in, while the answer is still on its way
        return answer

    monkeypatch.setattr(two.engine.backend, "acquire", slow_answer)
    started = time.monotonic()
    lease = two.held("a", wait=20.0)
    assert time.monotonic() - started < 8
    assert two.release(lease)


def test_pubsub_connections_may_be_killed_at_any_time(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one = runs()
    stop = threading.Event()
    turns: list[float] = []

    def work() -> None:
        while not stop.is_set():
            started = time.monotonic()
            lease = one.held("a", wait=30.0, lease=0.9)
            turns.append(time.monotonic() - started)
            time.sleep(0.002)
            one.release(lease)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for _ in range(8):
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        time.sleep(0.15)
    wait_for(lambda: len(turns) > 50, what="some turns")
    stop.set()
    for worker in workers:
        worker.join(30)
    assert max(turns) < 10
    assert leftovers(client, namespace) == [f"{namespace}:{{0}}:meta"]


def test_a_forked_child_waits_with_an_inbox_of_its_own(
    runs: Callable[..., Runs], redis_url: str, namespace: str
) -> None:
    program = """
    from celery_relock.engine import lease as lease_module
    lease_module.WAITER_LEASE = 60.0
    here = engine()
    ready(here)
    child = os.fork()
    if child == 0:
        ready(here)
        held(here, "a", wait=30.0, seconds=30.0)
        say("in")
        os._exit(0)
    os.waitpid(child, 0)
    """
    one = runs()
    holder = one.held("a")
    with running(program, redis_url, namespace) as forking:
        queued(one, 1)
        time.sleep(0.3)  # it has looked for itself when it began to listen, and does not again
        started = time.monotonic()
        one.release(holder)
        assert forking.line() == "in"
        assert time.monotonic() - started < 8  # and not at the next heartbeat, after 10 s


def test_a_waiter_acquires_when_a_holder_was_killed(
    runs: Callable[..., Runs], redis_url: str, namespace: str, rare_heartbeats: None
) -> None:
    one = runs()
    with waiting(redis_url, namespace, count=1, lease=1.0) as (program,):
        assert program.line() == "in"
        waiter = Waiter(one).start()
        program.kill()
        started = time.monotonic()
        assert waiter.entered.wait(30)
        assert time.monotonic() - started < 8
        waiter.finish()


def test_a_waiters_lease_is_bounded_however_long_the_lock_is_held() -> None:
    assert lease_module.WAITER_LEASE <= 10
