"""Locks of processes that died: what each process holds, and who frees it.

A process that is killed cannot release anything, and its leases take their time. So each process of
a worker keeps a journal, a small file of what it holds, mapped into memory: a write copies some
bytes, and the page stays when the process is gone. A reaper on the same host frees what the dead
have left, by execution and attempt, so the reaper never frees what somebody else holds by now. A
process that sends calls in order (`order/client.py`) notes the places of what it is about to send.

Only a shortcut: where there is no /proc, no room or no right to write, the leases end the holds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import LockConfigError, RelockError
from . import events
from .events import logger
from .outage import Outage
from .platform import anew_in_a_child, for_with, fork_gate
from .protocol import KEPT, LINE, MARKER, MAY_COME, Backend, Release, Successor

if TYPE_CHECKING:
    from mmap import mmap

    from .parking import Parking

# Bytes of a claim, how many by which the file grows, and how often it does. One that does not fit
# is not noted: its lease ends its holds.
_SLOT, _SLOTS, _MOST = 2048, 128, 64
# To be raised with every change of the records: what one version has written, a reaper of another
# would take for empty and throw away, and a host has both while workers are replaced.
_FORMAT = 4
#: `Entry.keep` of a message that leaves its queues and may come again: its end is not remembered.
FORGET = -1.0


class Entry(NamedTuple):
    """One claim of a process.

    Attributes:
        backend: which Redis and namespace (see `Backend.id`).
        names: of its locks; none for a message that is to leave its queues.
        owner, task_name, task_id: what the claim was for, "" where nobody knows.
        successors, keep: the executions that the hold is left to, and for how many seconds (see
            `Successor`).
    """

    backend: str
    execution_id: str
    attempt_id: str
    names: tuple[str, ...]
    owner: str = ""
    task_name: str = ""
    task_id: str = ""
    successors: str = ""
    keep: float = 0.0

    def record(self) -> bytes:
        """As `read` reads it."""
        backend, execution_id, attempt_id, names, *told, keep = self
        lines = backend, execution_id, attempt_id, *told, f"{keep:g}", *names
        return "\n".join(lines).encode()


def kept_for(backend: Backend, execution_id: str, *names: str) -> Entry:
    """What is kept for an execution that does not come; without names, its parked message."""
    return Entry(backend.id, execution_id, KEPT, names)


class Journal:
    """The claims of this process. A forked child begins with an empty one of its own.

    Attributes:
        on: whether claims are noted. Off until a worker starts: the locks of other processes end by
            their leases.
    """

    def __init__(self) -> None:
        self.on = False
        anew_in_a_child(self)

    def _reset(self) -> None:
        self._maps: list[mmap] = []
        self._path: Path | None = None
        # The first to open it has `begun`. A thread that comes meanwhile waits until it is `ready`;
        # a signal's handler on the same thread does not.
        self._opening = for_with(threading.RLock())
        self._begun = self._ready = False
        self._free: list[int] = []
        self._slots: OrderedDict[str, int] = OrderedDict()  # its popitem is safe beside threads

    def note(self, key: str, entry: Entry) -> None:
        """Note what is to be released if this process is killed, until `remove(key)`. A claim, by
        its attempt, before it is sent: to free what was never granted does no harm."""
        if key in self._slots:
            return
        if not self._ready:
            with self._opening:
                self._open()
        text = entry.record()
        if not self._maps or len(text) > _SLOT - 2:
            return
        if not self._free and len(self._maps) < _MOST:
            with self._opening, contextlib.suppress(OSError, ValueError):
                self._grow()
        try:
            # The oldest gives way: it may be of a lock that was dropped, or never answered for.
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        except (IndexError, KeyError):
            return  # other threads took the last one
        self._slots[key] = slot
        self._write(slot, text)

    def change(self, entry: Entry) -> bool:
        """Note something else of a claim that is noted. Without room the old note stays: False."""
        slot = self._slots.pop(entry.attempt_id, None)
        if slot is None:
            return False
        new = slot
        if fits := len(text := entry.record()) <= _SLOT - 2:
            with contextlib.suppress(IndexError):  # else in its place, in two steps
                new = self._free.pop()
            self._write(new, text)
        self._slots[entry.attempt_id] = new
        if new != slot:
            self._empty(slot)
        return fits

    def remove(self, key: str) -> None:
        """Forget a claim by its attempt, when its locks have been released; or a note."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._empty(slot)

    def _write(self, slot: int, text: bytes) -> None:
        if self._maps:
            which, at = divmod(slot, _SLOTS)
            start, into = at * _SLOT, self._maps[which]
            into[start : start + 2] = b"\0\0"
            into[start + 2 : start + 2 + len(text)] = text
            # The length last: until it is there the slot counts as empty.
            into[start : start + 2] = len(text).to_bytes(2, "big")

    def _empty(self, slot: int) -> None:
        if self._maps:
            which, at = divmod(slot, _SLOTS)
            self._maps[which][at * _SLOT : at * _SLOT + 2] = b"\0\0"
            self._free.append(slot)

    def _open(self) -> None:
        if self._begun:
            return
        self._begun = True
        try:
            where = folder()
            _throw_away_old(where)
            self._path = where / process_name(os.getpid())
            self._path.write_bytes(b"")
            self._grow()
        except (OSError, ValueError) as error:
            logger.info(
                "Cannot write a journal: a killed process's locks end by their leases: %s", error
            )
            self.close()
            self._path = None
        finally:
            self._ready = True

    def _grow(self) -> None:
        """Make room for more claims. Raises OSError without room on the disk."""
        from mmap import mmap  # loading it takes a tenth of what importing the library does

        assert self._path is not None
        size, before = _SLOT * _SLOTS, len(self._maps) * _SLOT * _SLOTS
        with self._path.open("r+b") as file:
            # Not by `truncate`: where the disk is full, a write into a hole kills the process.
            file.seek(before)
            file.write(bytes(size))
            file.flush()
            self._maps.append(mmap(file.fileno(), size, offset=before))
        first = len(self._maps) * _SLOTS - _SLOTS
        self._free.extend(range(first, first + _SLOTS))

    def close(self) -> None:
        """This process ends. What is still noted is for a reaper."""
        if self._path is not None and not self._slots:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _throw_away_old(where: Path) -> None:
    """The journals of the dead, on a host where no reaper comes for them: of those that died long
    ago, and those with nothing noted. A forked child ends without `close`, and leaves its own. In
    the folders of other boots and containers, which end without a reaper, the age decides."""
    for path in where.parent.glob("*/*"):
        with contextlib.suppress(OSError):
            is_here = path.parent == where
            if is_here and alive(path.name):
                continue
            is_old = path.stat().st_mtime + FORGET_AFTER < time.time()
            if is_old or (is_here and not any(read(path))):
                path.unlink()
            if not is_here:
                path.parent.rmdir()  # unless one is left


def _keep_young(path: Path) -> None:
    """Notes do not change the time of a file everywhere (tmpfs), and who cleans up goes by that."""
    with contextlib.suppress(OSError):
        if path.stat().st_mtime + FORGET_AFTER / 24 < time.time():
            os.utime(path)


def folder() -> Path:
    """Where the processes that can see each other keep their journals.

    By boot and pid namespace: a process of another container is not ours to call dead.

    Raises:
        OSError: there is no /proc, it is that of another pid namespace, or the folder cannot be
            made or belongs to somebody else.
    """
    if Path("/proc/self").readlink().name != str(os.getpid()):
        raise OSError("/proc does not show this process by its id")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    space = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    path = Path(tempfile.gettempdir()) / f"relock-{os.getuid()}" / f"{boot}-{space}-{_FORMAT}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise OSError(f"{path.parent} belongs to somebody else")
    return path


def process_name(pid: int) -> str:
    """`<pid>-<start time>`: a pid may be used again, a pid and its start time never.

    Raises:
        OSError: there is no such process.
    """
    return f"{pid}-{_stat(pid)[19]}"


def alive(name: str) -> bool:
    """Whether the process with this `process_name` runs. A zombie does not.

    Raises:
        OSError: nobody can tell. To take the process for dead would free its locks under it.
    """
    pid = name.partition("-")[0]
    try:
        stat = _stat(pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return _is_hidden(pid)
    return f"{pid}-{stat[19]}" == name and stat[0] not in "ZX"


def _is_hidden(pid: str) -> bool:
    """Whether a process of this user runs that /proc does not show. Mounted with `hidepid` it hides
    one that has changed its user, as `celery worker --uid` does before it has its children."""
    try:
        os.kill(int(pid), 0)
    except (OSError, ValueError):
        return False  # there is none, or another user's, or it is no process id
    # A zombie takes a signal, too.
    with contextlib.suppress(OSError, AttributeError):
        poll, descriptor = select.poll(), os.pidfd_open(int(pid))
        try:
            poll.register(descriptor, select.POLLIN)
            return not poll.poll(0)
        finally:
            os.close(descriptor)
    return True


def _stat(pid: int | str) -> list[str]:
    """What /proc tells of a process, from its state on: that is field 3, and its start 22."""
    # The name of the program is in brackets and may hold anything (proc(5)).
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def read(path: Path) -> Iterator[Entry]:
    """The claims in a process's journal, which may be broken off anywhere."""
    # Suppressed alone: anything else must not look like an empty journal.
    with contextlib.suppress(FileNotFoundError):
        data = path.read_bytes()
        for start in range(0, len(data), _SLOT):
            length = int.from_bytes(data[start : start + 2], "big")
            record = data[start + 2 : start + 2 + length]
            if 0 < length <= _SLOT - 2 and len(record) == length:
                lines = record.decode(errors="replace").split("\n")
                with contextlib.suppress(ValueError):  # of another version, or overwritten
                    backend, execution_id, attempt_id, *rest = lines
                    owner, task, task_id, successors, keep, *names = rest
                    told = owner, task, task_id, successors, float(keep)
                    yield Entry(backend, execution_id, attempt_id, tuple(names), *told)


# How often the reaper looks at the journals, in seconds: with pidfds it hears of a death by itself,
# and looks for processes that have just begun to acquire locks; without them it looks for the dead.
LOOK_EVERY, LOOK_OFTEN = 1.0, 0.2
# How soon after a look in vain: within a second the backend is not waited for as long again. It may
# be one node of a cluster, and another one has the locks of the next that dies.
LOOK_AGAIN = 0.5
# For how long a claim of a dead process is refused, in seconds: its command may come late.
REMEMBER_DEAD = 60.0
# When a journal that nobody came for is thrown away, in seconds: all its leases have long ended.
FORGET_AFTER = 86_400.0


class Reaper:
    """Frees what dead processes of this host have left behind, as soon as they are dead.

    A worker's main process has one reaper. How a process died does not matter, nor whether Celery
    noticed: the reaper looks whether the process is gone. A child that is about to be killed (a
    hard time limit) is not gone yet, and its lock is not freed under it.

    Args:
        parking: of the backend whose locks to free; sends what is parked for them. Journals name
            other backends' locks, too; these stay for their own reapers.
    """

    def __init__(self, parking: Parking) -> None:
        self._parking = parking
        self._deaths = select.poll()
        #: The descriptors of the living, whose deaths end a poll.
        self._watched: dict[str, int] = {}
        #: Journals of the dead that name other backends' locks alone, and when each is to go. The
        #: dead write no more, so nobody has to read these twice.
        self._foreign: dict[str, float] = {}
        #: The dead whose journals stay, by when they were first found.
        self._found: dict[str, float] = {}
        self._outage = Outage("releasing the locks of dead processes")
        self._trouble = Outage("looking for dead processes")
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; the first look frees what died before. Without journals it does nothing."""
        try:
            folder()
        except OSError as error:
            logger.warning(
                "Cannot read journals: killed processes' locks end by their leases: %s", error
            )
            return
        self._thread = threading.Thread(target=self._live, name="relock-reaper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End within a second."""
        self._stop.set()

    def _live(self) -> None:
        often = not hasattr(os, "pidfd_open")
        while not self._stop.is_set():
            with self._trouble:
                self.look()
            if self._trouble.failures:
                # Who is dead and was not come to would end the poll at once.
                self._stop.wait(LOOK_EVERY)
            else:
                again = LOOK_AGAIN if self._outage.failures else LOOK_EVERY
                # Ends early when a process dies that is watched.
                self._deaths.poll((LOOK_OFTEN if often else again) * 1000)

    def look(self) -> None:
        """Free what the dead hold, and watch the living."""
        failures, found = list[RelockError](), list(folder().iterdir())
        names = {path.name for path in found}
        for known in (self._foreign, self._found):
            for name in known.keys() - names:
                del known[name]
        # Another reaper has buried these. Their descriptors would end each wait at once, for ever.
        for name in self._watched.keys() - names:
            self._unwatch(name)
        for path in found:
            if time.time() < self._foreign.get(path.name, 0.0):
                continue
            if alive(path.name):
                if path.name not in self._watched:
                    self._watch(path.name)
                _keep_young(path)
            else:
                self._unwatch(path.name)
                failures += self._bury(path)
        if failures or self._outage.failures:
            with self._outage:
                if failures:
                    raise failures[0]

    def _watch(self, name: str) -> None:
        try:
            self._watched[name] = os.pidfd_open(int(name.partition("-")[0]))
        except (OSError, AttributeError):
            # Gone this moment; or the kernel, a sandbox or this build of Python has no pidfds. Then
            # the next look at /proc finds out.
            return
        self._deaths.register(self._watched[name], select.POLLIN)

    def _unwatch(self, name: str) -> None:
        descriptor = self._watched.pop(name, None)
        if descriptor is not None:
            self._deaths.unregister(descriptor)
            os.close(descriptor)

    def _bury(self, path: Path) -> list[RelockError]:
        """Free what a dead process held, or leave a hold to its successors. The journal goes when
        nothing is left to do. Returns the errors of what is to be tried again."""
        failures, is_foreign = list[RelockError](), False
        for entry in read(path):
            try:
                if entry.backend != self._parking.backend.id:
                    is_foreign = True
                    continue
                if not entry.names:
                    remember = MAY_COME if entry.keep == FORGET else None
                    attempt = "" if entry.attempt_id == KEPT else entry.attempt_id
                    self._parking.withdraw(entry.execution_id, remember, attempt)
                    continue
                held = self._holds(entry)
                left_to = Successor(entry.successors, entry.keep) if entry.successors else None
                of = entry.names, entry.execution_id, entry.attempt_id
                killed = Release(*of, "killed", REMEMBER_DEAD, successor=left_to)
                # All reapers of a host hear of a death at once: one of them has released it.
                held = self._parking.release(killed) and held
            except RelockError as error:
                failures.append(error)
                continue
            # To people a line or a marker is a part of the lock.
            if held and not entry.names[0].startswith((LINE, MARKER)):
                _tell(entry, path.name.partition("-")[0])
        # What is foreign is for another backend's reaper, which may never come. Not by the time of
        # the file, which can be that of its first note (on tmpfs).
        forget_at = self._found.setdefault(path.name, time.time()) + FORGET_AFTER
        if not (failures or is_foreign) or time.time() > forget_at:
            self._found.pop(path.name)
            path.unlink(missing_ok=True)  # another reaper may have been faster
        elif not failures:
            self._foreign[path.name] = forget_at
        return failures

    def _holds(self, entry: Entry) -> bool:
        """Whether a claim holds one of its locks; else it waits for them, if anything."""
        for name in entry.names:
            with contextlib.suppress(LockConfigError):  # the key of another program
                holds = self._parking.backend.inspect(name, (entry.execution_id,)).holds
                if any(each.attempt_id == entry.attempt_id for each in holds):
                    return True
        return False


def _tell(entry: Entry, process: str) -> None:
    reason = f"its holder, process {process} of this host, is dead (execution {entry.execution_id})"
    work = events.Work(None, entry.task_name, entry.task_id)
    event = events.LockEvent(
        "reclaimed", entry.names, entry.execution_id, entry.owner, reason=reason, work=work
    )
    with fork_gate.closed():
        events.tell(event)


journal = Journal()
atexit.register(journal.close)
