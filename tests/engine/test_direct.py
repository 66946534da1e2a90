"""One waiter of a process hears of its turn by itself, on a connection of its own."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis

from celery_relock.engine.lease import State
from celery_relock.engine.protocol import Conflict
from tests.engine.conftest import Runs
from tests.engine.test_waiters import Waiter
from tests.support import RedisServer, programs, wait_for


def no_heartbeat(waiter: Waiter) -> None:
    """Only a message can tell of the grant now."""
    waiter.lease.due += 100.0


def test_who_waits_alone_needs_no_thread_and_keeps_its_connection(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one, two = runs(), runs()
    channels = []
    for _ in range(3):
        holder = one.held("a")
        waiter = Waiter(two).start()
        no_heartbeat(waiter)
        channels += client.pubsub_channels(f"{namespace}:*")
        one.release(holder)
        assert waiter.entered.wait(1.0)
        waiter.finish()
    assert len(channels) == 3
    assert len(set(channels)) == 1
    assert not two.engine._inbox.started


def test_others_of_its_process_hear_by_the_inbox(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    waiters = [Waiter(two).start() for _ in range(3)]
    assert [bool(waiter.lease.bell.channel) for waiter in waiters] == [True, False, False]
    assert two.engine._inbox.started
    one.release(holder)
    for waiter in waiters:
        no_heartbeat(waiter)
        assert waiter.entered.wait(1.0)
        waiter.finish()
    again = Waiter(two)
    holder = one.held("a")
    again.start()
    assert again.lease.bell.channel, "the connection has come back"
    one.release(holder)
    assert again.entered.wait(1.0)
    again.finish()


def test_a_connection_that_is_cut_is_opened_again_while_its_waiter_waits(
    runs: Callable[..., Runs], own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    one, two = runs(server.url), runs(server.url)
    client = server.client()
    holder = one.held("a")
    waiter = Waiter(two).start()
    channel = client.pubsub_channels()
    assert len(channel) == 1
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    wait_for(lambda: client.pubsub_channels() == channel, 3, what="the connection")
    # The heartbeat that looks for what was missed has been.
    wait_for(lambda: waiter.lease.due > time.monotonic() + 0.5)
    no_heartbeat(waiter)
    one.release(holder)
    assert waiter.entered.wait(1.0)
    waiter.finish()


def test_what_was_granted_while_the_connection_was_cut_is_found(
    runs: Callable[..., Runs], own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    one, two = runs(server.url), runs(server.url)
    holder = one.held("a")
    waiter = Waiter(two).start()
    pipe = server.client().pipeline(transaction=False)
    pipe.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    pipe.execute()
    one.release(holder)
    assert waiter.entered.wait(1.5)
    waiter.finish()


def test_after_a_restart_of_the_server_the_next_wait_has_a_new_connection(
    runs: Callable[..., Runs], own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    one, two = runs(server.url), runs(server.url)
    two.ready()
    server.restart(keep_data=False)
    holder = one.held("a")
    waiter = Waiter(two).start()
    wait_for(lambda: len(server.client().pubsub_channels()) == 1, 3, what="the connection")
    wait_for(lambda: waiter.lease.due > time.monotonic() + 0.5)
    no_heartbeat(waiter)
    one.release(holder)
    assert waiter.entered.wait(1.0)
    waiter.finish()


def test_a_grant_for_one_that_has_gone_is_passed_over_by_the_next(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one, two = runs(), runs()
    two.ready()
    holder = one.held("a")
    (channel,) = client.pubsub_channels(f"{namespace}:*")
    client.publish(channel, "granted of-another-run nonce 1")
    waiter = Waiter(two).start()
    no_heartbeat(waiter)
    client.publish(channel, "granted of-a-third-run nonce 2")
    time.sleep(0.1)
    assert waiter.lease.state is State.WAITING
    one.release(holder)
    assert waiter.entered.wait(1.0)
    waiter.finish()


def test_a_wait_that_runs_out_gives_the_connection_back(runs: Callable[..., Runs]) -> None:
    one, two = runs(), runs()
    holder = one.held("a")
    for _ in range(3):
        assert isinstance(two.engine.acquire(two.lease("a"), 0.1), Conflict)
    assert len(two.engine._inbox._bells) == 1
    one.release(holder)


def test_a_forked_child_leaves_its_parents_connection_alone(redis_url: str, namespace: str) -> None:
    said = programs.run(
        """
        first, second = engine(), engine()
        def turn():
            mine = held(first, "a")
            thread = threading.Timer(0.1, first.release, [mine])
            thread.start()
            second.release(held(second, "a", wait=5.0))
            thread.join()
            return second._inbox._bells[0].channel
        before = turn()
        child = os.fork()
        if child == 0:
            os._exit(3 if turn() != before else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        started = time.monotonic()
        assert turn() == before
        say(time.monotonic() - started < 1.0)
        """,
        redis_url,
        namespace,
    )
    assert said == ["True"]


def test_an_exception_in_the_middle_of_a_wait_costs_the_next_one_nothing(
    runs: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = runs(), runs()
    two.ready()
    holder = one.held("a")
    (bell,) = two.engine._inbox._bells
    heard = bell._line.hear

    class Stop(Exception):
        """As a time limit raises."""

    def stopped(seconds: float) -> None:
        heard(0.01)
        raise Stop

    monkeypatch.setattr(bell._line, "hear", stopped)
    lease = two.lease("a")
    with pytest.raises(Stop):
        two.engine.acquire(lease, 5.0)
    two.release(lease)
    assert not bell.usable, "half a message may be left on it"
    waiter = Waiter(two).start()
    no_heartbeat(waiter)
    assert waiter.lease.bell.channel not in ("", bell.channel)
    one.release(holder)
    assert waiter.entered.wait(1.0)
    waiter.finish()


def test_who_has_waited_lets_the_next_one_hear_first(
    runs: Callable[..., Runs], own_redis: Callable[..., RedisServer]
) -> None:
    """Redis writes in reverse: whoever asked something before, in the same breath, hears last."""
    server = own_redis()
    one, two = runs(server.url), runs(server.url)
    one.release(one.held("a"))  # the server has the scripts
    holder = one.held("a")
    waiter = Waiter(two).start()
    commands: list[str] = []
    with server.client().monitor() as monitor:
        one.release(holder)
        assert waiter.entered.wait(2.0)
        waiter.finish()
        while commands.count("EVALSHA") < 2:
            command = monitor.next_command()
            if command["client_type"] != "lua":
                commands.append(command["command"].split()[0].upper())
    assert commands == ["EVALSHA", "PING", "EVALSHA"]
