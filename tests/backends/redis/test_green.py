"""Locks under gevent, whose greenlets share a thread that may be busy for seconds."""

from __future__ import annotations

from tests.support import programs
from tests.support.programs import GEVENT


def test_greenlets_acquire_a_lock_in_turn_while_others_go_on(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        first, inside, most, ticks = engine(), 0, 0, 0

        def work(number):
            global inside, most
            own = held(first, "a", wait=30.0, seconds=30.0)
            inside += 1
            most = max(most, inside)
            time.sleep(0.05)
            inside -= 1
            assert first.release(own)

        def tick():
            global ticks
            while True:
                ticks += 1
                time.sleep(0.01)

        spawn(tick)
        start = time.monotonic()
        for one in [spawn(work, n) for n in range(10)]:
            join(one)
        say(most, ticks > 20, time.monotonic() - start < 25)
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["1 True True"]


def test_a_native_thread_leaves_nothing_of_gevent_behind(redis_url: str, namespace: str) -> None:
    said = programs.run(
        """
        import gc, redis
        from celery_relock.engine.platform import start_native_thread

        # A worker has its hub long before. Two threads that are the first to make one can wait
        # for each other's imports for ever (seen on Python 3.10).
        time.sleep(0.01)

        def ask():
            with redis.Redis.from_url(URL) as client:
                client.ping()

        def ask_in_threads(number):
            before = threads()
            for _ in range(number):
                start_native_thread(ask)
            while threads() > before:
                time.sleep(0.01)
            gc.collect()
            return len(os.listdir("/proc/self/fd"))

        say(ask_in_threads(1) == ask_in_threads(5))
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["True"]


def test_a_lock_goes_from_one_process_to_a_greenlet_of_another(
    redis_url: str, namespace: str
) -> None:
    program = """
        first = engine()
        for n in range(20):
            own = held(first, "a", wait=40.0, seconds=30.0)
            time.sleep(0.005)
            assert first.release(own)
        say("done")
        """
    processes = [programs.start(program, redis_url, namespace, first=GEVENT) for _ in range(3)]
    assert [programs.finish(process) for process in processes] == [["done"]] * 3


def test_a_greenlet_that_computes_for_two_leases_keeps_its_lock(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        first = engine()
        own = held(first, "a", seconds=2.0)
        until = time.monotonic() + 4.2
        while time.monotonic() < until:
            pass
        held_by = [hold.execution_id for hold in first.inspect("a").holds]
        say(own.lost, held_by == [own.claim.execution_id])
        say(first.release(own))
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["False True", "True"]


def test_a_greenlet_may_re_enter_by_its_owner_and_strangers_may_not(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        from celery_relock.engine.protocol import Conflict
        first = engine()
        outer = held(first, "a", owner="workflow", by_owner=True, seconds=5.0)

        def inner():
            again = held(first, "a", owner="workflow", by_owner=True, seconds=5.0)
            assert again.fences == outer.fences and again.reentered == (True,)
            return first.release(again)

        def stranger():
            return isinstance(first.acquire(lease(first, "a", owner="other")), Conflict)

        say(join(spawn(inner)), join(spawn(stranger)))
        say(first.release(outer))
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["True True", "True"]


def test_a_greenlet_whose_lock_is_lost_is_interrupted_and_its_neighbour_is_not(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        from celery_relock.engine.interrupt import Interruption
        from celery_relock.errors import LockLost
        first = engine()

        def body(name, lose):
            own = held(first, name, seconds=30.0)
            if lose:
                first.backend.force_release(name)
            try:
                with Interruption(own, lambda: LockLost("it is lost")):
                    for _ in range(1000 if lose else 20):
                        time.sleep(0.02)
                return "to the end"
            except LockLost as error:
                return error.reason
            finally:
                first.release(own)

        start = time.monotonic()
        one, two = spawn(body, "a", True), spawn(body, "b", False)
        say(join(one))
        say(time.monotonic() - start < 10)
        say(join(two))
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["it is lost", "True", "to the end"]


def test_nothing_is_thrown_at_a_greenlet_after_its_body(redis_url: str, namespace: str) -> None:
    said = programs.run(
        """
        import random
        from celery_relock.engine.interrupt import Interruption
        from celery_relock.errors import LockLost
        first = engine()
        heard = unheard = 0

        def body(name):
            global heard, unheard
            own = lease(first, name)
            interruption = Interruption(own, lambda: LockLost("it is lost"))
            spawn(shoot, interruption, random.uniform(0, 0.25))
            try:
                with interruption:
                    time.sleep(random.uniform(0, 0.25))
                unheard += 1
            except LockLost:
                heard += 1
            time.sleep(0.4)            # nothing may come here

        def shoot(interruption, pause):
            time.sleep(pause)
            interruption.fire()

        for one in [spawn(body, f"lock {n}") for n in range(200)]:
            join(one)
        say(heard > 0, unheard > 0, heard + unheard)
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["True True 200"]


def test_a_loss_is_told_while_a_greenlet_holds_the_lock_of_the_log(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        from celery_relock.engine import events
        logging.disable(logging.NOTSET)
        out = logging.StreamHandler(sys.stdout)
        logging.getLogger("celery_relock").addHandler(out)
        first = engine()
        gone, kept = held(first, "gone"), held(first, "kept")
        first.backend.force_release("gone")
        with out.lock:                 # as a greenlet that is in the middle of writing a line
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                time.sleep(0.05)
        say(gone.lost, kept.lost)
        out.acquire = out.release = lambda: None
        os._exit(0)
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert "True False" in said


def test_gevent_that_is_loaded_but_not_at_work_changes_nothing(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import gevent.monkey
        from celery_relock.engine.interrupt import Interruption
        from celery_relock.errors import LockLost
        first = engine()
        own = held(first, "a", seconds=30.0)
        first.backend.force_release("a")
        import logging; logging.disable()
        try:
            with Interruption(own, lambda: LockLost("it is lost")):
                time.sleep(20)
        except LockLost as error:
            say(error.reason)
        """,
        redis_url,
        namespace,
    )
    assert said == ["it is lost"]


def test_coroutines_wait_for_a_lock_and_renew_it_where_threads_are_greenlets(
    redis_url: str, namespace: str
) -> None:
    said = programs.run(
        """
        import asyncio
        from celery_relock.asyncio import Lock

        order = []

        async def work(number):
            async with Lock(URL, "a", 1.5, namespace=NAMESPACE) as one:
                order.append(number)
                if number == 0:
                    await asyncio.sleep(2)
                one.check()

        async def main():
            await asyncio.gather(*map(work, range(10)))

        asyncio.run(main())
        say(sorted(order) == list(range(10)))
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["True"]


def test_a_greenlet_is_no_coroutine_of_the_loop_that_another_greenlet_runs(
    redis_url: str, namespace: str
) -> None:
    """asyncio keeps the loop that runs, and its task, by the thread that the greenlets share."""
    said = programs.run(
        """
        import asyncio
        from celery_relock import Lock
        calls, goes_on, waits, over = (threading.Event() for _ in range(4))
        one, two = (Lock(URL, name, namespace=NAMESPACE, timeout=30) for name in "ab")

        async def another():
            return two.owned(), two.acquire(blocking=False)

        async def in_the_loop():
            calls.set()
            goes_on.wait()  # a blocking call, in which this task stays the current one
            with two:
                say(two.owned(), await asyncio.create_task(another()))
            waits.set()
            while not over.is_set():
                await asyncio.sleep(0.01)

        running = spawn(asyncio.run, in_the_loop())
        calls.wait()
        with one:
            goes_on.set()
            waits.wait()
            say(one.owned())
        say(one.locked())
        over.set()
        join(running)
        """,
        redis_url,
        namespace,
        first=GEVENT,
    )
    assert said == ["True (False, False)", "True", "False"]
