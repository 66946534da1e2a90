"""Threads of the operating system, forks, gevent, and the clock.

A greenlet that computes without pause starves every other greenlet of its thread. A lease must be
renewed all the same, so the keep-alive needs a thread of the operating system.
"""

from __future__ import annotations

import _thread
import atexit
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakSet, finalize

from ..errors import LockConfigError, LockUnavailable

if TYPE_CHECKING:
    from concurrent.futures import Future

_T = TypeVar("_T")

#: The process in which everything here has begun. In a child that C code has forked, as uWSGI's
#: does, that is the parent until `notice_fork`: Python's fork hooks do not run there.
begun_in = os.getpid()
#: Seconds by which leases count. Nobody sets this clock; and while a machine is suspended it goes
#: on, as that of Redis does and `time.monotonic` does not.
clock = partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
_anew: WeakSet[Any] = WeakSet()


def _begin() -> None:
    global begun_in
    for each in list(_anew):
        each._reset()
    begun_in = os.getpid()


os.register_at_fork(after_in_child=_begin)


def notice_fork() -> None:
    """Begin anew if nothing has begun in this process. To be called before something does."""
    if begun_in != os.getpid():
        with _noticing:
            if begun_in != os.getpid():
                _begin()


def anew_in_a_child(what: Any) -> None:
    """Let an object begin by its `_reset`, now and in each forked child."""
    _anew.add(what)
    what._reset()


def green() -> bool:
    """Whether gevent has replaced threads by greenlets."""
    gevent = sys.modules.get("gevent.monkey")
    return gevent is not None and bool(gevent.is_module_patched("threading"))


def coroutine() -> Any:
    """The asyncio task that runs here, None outside of an event loop. asyncio is not loaded just to
    say no."""
    try:
        task = sys.modules["asyncio"].current_task()
    except (KeyError, RuntimeError):
        return None
    return None if task is None or (green() and _is_of_another_greenlet(task)) else task


def _is_of_another_greenlet(task: Any) -> bool:
    """asyncio knows the loop that runs, and its task, by the thread, which all greenlets share.
    The loop notes who runs it by `threading.get_ident`, which tells greenlets apart."""
    here = threading.get_ident()
    return bool(getattr(task.get_loop(), "_thread_id", here) != here)


def refuse_eventlet() -> None:
    """Raise LockConfigError where eventlet has replaced threads by greenlets, these too."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise LockConfigError(
            "a lock cannot be held under eventlet, which leaves no thread to renew it while a body "
            "computes. Use the gevent pool (celery worker -P gevent), or prefork or threads"
        )


def _original(name: str) -> Any:
    """An attribute of `_thread` from before gevent replaced it."""
    if "gevent.monkey" in sys.modules:
        return sys.modules["gevent.monkey"].get_original("_thread", name)
    return getattr(_thread, name)


class NoThread(LockUnavailable, RuntimeError):
    """A thread cannot be started. Also the RuntimeError that Python raises then."""


def start_native_thread(target: Callable[[], None]) -> None:
    """Run `target` in an OS thread that never keeps the process from ending.

    Raises:
        NoThread: the process is ending or has no thread to spare.
        LockConfigError: see `refuse_eventlet`.
    """
    refuse_eventlet()
    try:
        _original("start_new_thread")(_in_native_thread, (target,))
    except RuntimeError as error:
        raise NoThread(
            f"A lock needs a thread, and this process can start no thread ({error}). A process "
            "that ends is refused one, in Python 3.12 in an atexit handler too: use locks before."
        ) from error


def _green_thread(target: Callable[[], None]) -> None:
    _thread.start_new_thread(target, ())


def _in_native_thread(target: Callable[[], None]) -> None:
    block_signals()
    try:
        target()
    finally:
        if gevent := sys.modules.get("gevent"):
            # The thread's own event loop, with its file descriptors, which nothing else ends.
            gevent.get_hub().destroy(destroy_loop=True)


def block_signals() -> None:
    """Leave all signals to the main thread."""
    # A signal that a thread takes is handled in the main thread, whose blocking call then goes on:
    # a soft time limit would wait for the end of that call. The C library lets another thread have
    # the signal whenever the main thread is just starting a thread.
    faults = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - faults)


def native_lock() -> Any:
    """A lock that blocks the OS thread and never switches greenlets: for a few instructions."""
    return _original("allocate_lock")()


def for_with(lock: Any) -> Any:
    """A lock, for `with`. In Python 3.14 a signal handler that raises can strike when the lock has
    been acquired and the body has not begun, and then nobody releases it [cpython #148874]: the
    interpreter looks for signals when a C function has been called. It does not in a `for`."""
    if not (3, 14) <= sys.version_info < (3, 15):
        return lock
    acquired = iter(lock.acquire, None)

    def enter(_: Any) -> None:
        for _ in acquired:
            return

    return type("ForWith", (), {"__enter__": enter, "__exit__": lock.__exit__})()


_noticing = for_with(_original("RLock")())


class ForkGate:
    """`with fork_gate.closed():` around a call of other software in another thread than the main
    one.

    Celery forks a child at any moment, in the place of one that has ended. A lock that another
    thread has then, kombu's or that of a signal's receiver, is locked in the child for ever. So who
    forks waits until nobody is inside, and who comes waits until it has forked.
    """

    def __init__(self) -> None:
        anew_in_a_child(self)
        os.register_at_fork(before=self._wait, after_in_parent=self._open)

    def _reset(self) -> None:
        self._lock = native_lock()
        self._entering = for_with(self._lock)
        self._inside: dict[int, Any] = {}  # by thread: a lock that it has until it leaves

    @contextmanager
    def closed(self) -> Iterator[None]:
        """No child is forked meanwhile, unless it takes longer than `_FORK_WAITS`."""
        thread, inside = threading.get_ident(), native_lock()
        if thread in self._inside or green():  # gevent's threads do not run while one waits
            yield
            return
        inside.acquire()
        with self._entering:
            self._inside[thread] = inside
        try:
            yield
        finally:
            self._inside.pop(thread, None)
            inside.release()

    def _wait(self) -> None:
        self._lock.acquire()
        until = clock() + _FORK_WAITS
        for thread, inside in list(self._inside.items()):
            is_me = thread == threading.get_ident()
            if not is_me and not inside.acquire(timeout=max(until - clock(), 0.0)):
                self._inside.pop(thread, None)  # it hangs: the next fork does not wait for it

    def _open(self) -> None:
        with suppress(RuntimeError):  # a signal came before `_wait` had it
            self._lock.release()


# Seconds. A broker can be silent, and meanwhile the worker's main loop stands still.
_FORK_WAITS = 1.0
fork_gate = ForkGate()


class Guard:
    """`with guard.lock:` around a few instructions.

    A signal handler may run in the middle of them and come back here, so the same thread may enter
    again. A forked child gets a new lock: the thread that had the old lock may not have come along.
    """

    __slots__ = ("__weakref__", "_lock", "lock")

    def __init__(self) -> None:
        anew_in_a_child(self)

    def _reset(self) -> None:
        self._lock = _original("RLock")()
        self.lock = for_with(self._lock)

    def entered(self) -> bool:
        """Whether this thread is in the middle of the instructions already."""
        return bool(self._lock._is_owned())


class Solo:
    """A thread of which there is at most one. A forked child needs an object of its own.

    Args:
        work: what the thread does.
        more: whether there is more to do when that has ended, also by an exception.
        begin: starts a thread.

    Attributes:
        on: whether the thread is there, or about to be.
    """

    def __init__(
        self,
        work: Callable[[], object],
        more: Callable[[], object] = lambda: False,
        begin: Callable[[Callable[[], None]], None] = start_native_thread,
    ) -> None:
        self._work, self._more, self._begin = work, more, begin
        self.on = False
        self._alone = native_lock()

    def start(self) -> None:
        """Start the thread, if it is not there. Raises what `begin` does."""
        if self.on:
            return
        try:
            self.on = True
            self._begin(self._run)
        except BaseException:
            # A signal's, perhaps, and the thread has begun: then the next one ends at once.
            self.on = False
            raise

    def _run(self) -> None:
        if not self._alone.acquire(blocking=False):
            return
        try:
            self._work()
        finally:
            self._alone.release()
            self.on = False
            # Added after the last look, by somebody who still saw the thread.
            if self._more():
                with suppress(RuntimeError):  # no thread to spare: the next start tries again
                    self.start()


_Calls: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"


class Pool:
    """A few threads that make calls: at most so many at the same time; other calls wait for their
    turn. Begins with the first call, and anew in a forked child. Its threads end with it, and the
    process when all calls were made.

    Not a ThreadPoolExecutor, which makes no more calls when the main thread has ended: a loop in
    another thread goes on, and has locks to release.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        anew_in_a_child(self)
        _pools.add(self)

    def _reset(self) -> None:
        self._calls: _Calls = queue.SimpleQueue()
        self._threads, self._used = 0, clock()
        finalize(self, _end, self._calls, self._most).atexit = False
        self._open: set[Future[Any]] = set()

    def submit(self, call: Callable[..., _T], *args: Any) -> Future[_T]:
        """Let a thread make a call as soon as one is free.

        Raises:
            RuntimeError: the process is ending or has no thread to spare.
        """
        notice_fork()
        from concurrent.futures import Future  # few processes need it

        work: Future[_T] = Future()
        self._used = clock()
        with _guard.lock:  # each thread may have a loop
            if self._threads < self._most:
                # gevent's are greenlets of the main thread, which is to have its signals.
                start = _green_thread if green() else start_native_thread
                try:
                    start(partial(_work, self._calls))  # without the pool, as it ends with that
                    self._threads += 1
                except RuntimeError:
                    if not self._threads:  # else those that are there make it
                        raise
            self._calls.put((work, partial(call, *args)))
            self._open.add(work)  # when it is there: a signal may strike here
        work.add_done_callback(self._open.discard)
        return work

    def idle_for(self) -> float:
        """How many seconds ago the last call came; 0 while one is to be made."""
        return 0.0 if self._open else clock() - self._used

    def finish(self) -> None:
        """Wait until all calls were made."""
        if self._open:
            from concurrent.futures import wait

            wait(list(self._open))


_pools: WeakSet[Pool] = WeakSet()


@atexit.register
def _finish() -> None:
    # A release, say, of a task that was cancelled when its loop ended.
    notice_fork()  # the parent's calls are not made here
    for pool in list(_pools):
        pool.finish()


def _end(calls: _Calls, threads: int) -> None:
    for _ in range(threads):
        calls.put(None)


def _work(calls: _Calls) -> None:
    while (given := calls.get()) is not None:
        _make(*given)
        del given  # whose engine has the pool


def _make(work: Future[_T], call: Callable[[], _T]) -> None:
    """Make a call, unless it was cancelled, and tell what it has come to."""
    if not work.set_running_or_notify_cancel():
        return
    try:
        work.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is for who waits
        work.set_exception(error)
        del work  # which the error refers to by this frame


_guard = Guard()


class SideThread:
    """Makes calls, one after another, in a native thread of its own that ends when none is left.

    For what the keep-alive thread has to say: a log handler or a listener may take its time, or
    wait for a lock that a greenlet of another thread will never release to this thread.
    """

    def __init__(self) -> None:
        anew_in_a_child(self)

    def _reset(self) -> None:
        # Should one call never return, the calls after it must not fill the memory.
        self._calls: deque[Callable[[], None]] = deque(maxlen=100_000)
        self._thread = Solo(self._make_all, lambda: self._calls)

    def __call__(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        with suppress(RuntimeError):  # no thread to spare: the next call tries again
            self._thread.start()

    def _make_all(self) -> None:
        while self._calls:
            self._calls.popleft()()
