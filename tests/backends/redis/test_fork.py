"""A forked child holds nothing of what its parent holds; a process that ends holds up nobody."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import redis

from celery_relock.engine.protocol import Conflict, Held
from tests.support import programs, wait_for


def test_a_forked_child_holds_nothing_and_its_parent_keeps_everything(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        from celery_relock.engine.protocol import Conflict, Held
        first = engine()
        mine = held(first, "a")
        child = os.fork()
        if child == 0:
            assert threads() == 1, "the child got a thread that it did not ask for"
            assert mine.lost and mine.remaining == 0
            assert first.release(mine), "giving back what is not its own is nothing, and no error"
            assert isinstance(first.acquire(lease(first, "a")), Conflict)
            own = held(first, "b", seconds=3.0)
            assert threads() == 2
            until = time.monotonic() + 3.5
            while time.monotonic() < until:
                assert not own.lost
                time.sleep(0.02)
            assert first.release(own)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert not mine.lost
        assert [hold.execution_id for hold in first.inspect("a").holds] == [mine.claim.execution_id]
        say(first.release(mine))
        """,
        redis_url,
        namespace,
    )
    assert said == ["True"]


def test_a_child_that_c_code_forks_keeps_its_own_locks_over_connections_of_its_own(
    redis_url: str, namespace: str
) -> None:
    """As uWSGI forks its workers when it has loaded the app: Python's fork hooks do not run."""
    said = programs.run(
        """
        from celery_relock.backends.redis.connections import Effort
        from celery_relock.engine.events import label_of

        def ours():
            links = first.backend.transport.at(first.backend.keys.meta())
            (answer,) = links.exchange([("CLIENT", "ID")], Effort())
            return answer

        first = engine()
        mine = held(first, "a", seconds=30.0)
        theirs, heard = ours(), first.inbox.name
        child = fork_by_c()
        if child == 0:
            import faulthandler
            faulthandler.dump_traceback_later(30, exit=True)
            assert mine.lost and mine.remaining == 0
            assert first.release(mine), "giving back what is not its own is nothing, and no error"
            own = held(first, "b", seconds=1.5, label=label_of("child"))
            (hold,) = first.inspect("b").holds
            assert hold.label.endswith(f":{os.getpid()}"), hold
            assert ours() != theirs
            assert first.inbox.name != heard and own.inbox is first.inbox
            begun = own.renewed
            while own.renewed == begun:
                assert not own.lost
                time.sleep(0.01)
            assert first.release(own)
            os._exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 7, code
        assert not mine.lost and ours() == theirs
        say(first.release(mine))
        """,
        redis_url,
        namespace,
    )
    assert said == ["True"]


def test_coroutines_go_on_in_a_child_that_c_code_forks(redis_url: str, namespace: str) -> None:
    said = programs.run(
        """
        import asyncio
        from celery_relock.asyncio import Lock

        lock = Lock(engine(), "a")
        async def is_locked():
            return await asyncio.wait_for(lock.locked(), 20)

        for _ in range(4):
            asyncio.run(is_locked())  # its threads have begun

        child = fork_by_c()
        if child == 0:
            os._exit(7 if asyncio.run(is_locked()) is False else 1)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """,
        redis_url,
        namespace,
    )
    assert said == ["7"]


def test_children_of_multiprocessing_take_turns_with_their_parent(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import multiprocessing
        first = engine()
        mine = held(first, "a")

        def work(number):
            own = held(first, "a", wait=60.0)
            time.sleep(0.05)
            say("child", number)
            assert first.release(own)

        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=work, args=(n,)) for n in range(3)]
        for child in children:
            child.start()
        time.sleep(2.5)
        say("parent")
        assert first.release(mine)
        for child in children:
            child.join()
            assert child.exitcode == 0
        """,
        redis_url,
        namespace,
    )
    assert said[0] == "parent"
    assert sorted(said[1:]) == ["child 0", "child 1", "child 2"]


def test_a_fork_at_any_moment_of_the_keep_alive_leaves_both_sides_at_work(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import random
        first = engine()
        sys.setswitchinterval(1e-5)
        from celery_relock.engine.renewal import keepalive
        # The thread has something to do all the time, and the forks are in the middle of it.
        many = [held(first, f"lock {n}", seconds=30.0) for n in range(150)]
        for round in range(40):
            keepalive.look_now(first.backend)
            time.sleep(random.uniform(0, 0.02))
            child = os.fork()
            if child == 0:
                import signal
                signal.alarm(30)
                own = held(first, f"child {round}", seconds=30.0)
                os._exit(0 if first.release(own) else 1)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert status == 0, status
        say(any(one.lost for one in many))
        say(all([first.release(one) for one in many]))
        """,
        redis_url,
        namespace,
    )
    assert said == ["False", "True"]


def test_a_process_ends_at_once_with_its_own_exit_code_whatever_it_holds(
    redis_url: str, namespace: str, runs: Callable[..., Any]
) -> None:
    start = time.monotonic()
    programs.run(
        """
        first = engine()
        taken = [held(first, f"lock {n}") for n in range(50)]
        time.sleep(2.2)                # it renews, and listens
        waiter = lease(first, "lock 0", seconds=30.0)
        thread = threading.Thread(target=first.acquire, args=(waiter, 60.0), daemon=True)
        thread.start()
        time.sleep(0.2)
        sys.exit(3)
        """,
        redis_url,
        namespace,
        code=3,
    )
    assert time.monotonic() - start < 30
    other = runs()
    for n in range(0, 50, 7):
        assert isinstance(other.engine.acquire(other.lease(f"lock {n}"), 30.0), Held)


def test_os_exit_with_a_held_lock_leaves_it_to_its_lease(
    redis_url: str, namespace: str, runs: Callable[..., Any]
) -> None:
    programs.run(
        """
        taken = held(engine(), "a", seconds=3.0)
        os._exit(5)
        """,
        redis_url,
        namespace,
        code=5,
    )
    other = runs()
    assert isinstance(other.engine.acquire(other.lease("a")), Conflict)
    assert isinstance(other.engine.acquire(other.lease("a"), 30.0), Held)


def test_a_process_ends_without_a_word_while_its_leases_are_being_renewed(
    redis_url: str, namespace: str
) -> None:
    for _ in range(4):
        programs.run(
            """
            first = engine()
            taken = [held(first, f"{os.getpid()} {n}", seconds=1.5) for n in range(100)]
            time.sleep(0.5)  # in the middle of the first renewal
            """,
            redis_url,
            namespace,
        )


def test_a_killed_process_frees_its_lock_by_its_lease_alone(
    redis_url: str, namespace: str, client: redis.Redis, runs: Callable[..., Any]
) -> None:
    program = programs.start(
        """
        taken = held(engine(), "a", seconds=2.0)
        say("held")
        time.sleep(60)
        """,
        redis_url,
        namespace,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "held\n"
    other = runs()
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert isinstance(other.engine.acquire(other.lease("a")), Conflict)
        time.sleep(0.05)
    program.kill()
    killed = time.monotonic()
    wait_for(lambda: isinstance(other.engine.acquire(other.lease("a")), Held), what="the lock")
    assert time.monotonic() - killed < 15
    programs.finish(program, code=-signal.SIGKILL)
