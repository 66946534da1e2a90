"""What this process holds, written where it outlives the process.

A process that is killed cannot give anything back, and its leases take their time. So each process
of a worker keeps a small file of what it holds, mapped into memory: a write copies some bytes, and
the page stays when the process is gone. A reaper on the same host (`reaper`) frees what the dead
have left, by run and nonce, so it can never free what somebody else holds by now.

Only a shortcut: where there is no /proc, no room or no right to write, the lease does it alone.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("celery_relock")

_SLOT = 512
_SLOTS = 128
# To be raised with every change of the records: what one version has written, a reaper of another
# would take for empty and throw away, and a host has both while workers are replaced.
_FORMAT = 3


class Entry(NamedTuple):
    """One claim of a process: `store` says which Redis and namespace (see `LockStore.id`). `owner`
    and the task tell what it was for, "" where that is not known. `heirs` and `keep`: to whom it is
    left, and for how many seconds (see `Heir`)."""

    backend: str
    execution_id: str
    attempt_id: str
    names: tuple[str, ...]
    owner: str = ""
    task_name: str = ""
    task_id: str = ""
    heirs: str = ""
    keep: float = 0.0


class Journal:
    """The claims of this process. A forked child begins with an empty one of its own.

    Attributes:
        on: whether claims are noted. Off until a worker starts: elsewhere nobody would read them.
    """

    def __init__(self) -> None:
        self.on = False
        self._reset()

    def _reset(self) -> None:
        self._map: mmap.mmap | None = None
        self._opened = False
        self._free: list[int] = []
        self._slots: dict[str, int] = {}

    def add(self, entry: Entry) -> None:
        """Note a claim before it is sent: what was never granted is freed in vain, and no harm."""
        if not self.on or entry.attempt_id in self._slots:
            return
        if not self._opened:
            self._open()
        backend, execution_id, attempt_id, names, *told, keep = entry
        text = "\n".join((backend, execution_id, attempt_id, *told, f"{keep:g}", *names)).encode()
        if self._map is None or len(text) > _SLOT - 2 or not self._free:
            return
        slot = self._free.pop()
        self._slots[entry.attempt_id] = slot
        start = slot * _SLOT
        self._map[start + 2 : start + 2 + len(text)] = text
        # The length last: until it is there the slot counts as empty.
        self._map[start : start + 2] = len(text).to_bytes(2, "big")

    def change(self, entry: Entry) -> None:
        """Note something else of a claim that is noted; if there is no room, it stays as it was."""
        before = self._slots.pop(entry.attempt_id, None)
        if before is None or self._map is None:
            return
        self.add(entry)
        if entry.attempt_id not in self._slots:
            self._slots[entry.attempt_id] = before
            return
        self._map[before * _SLOT : before * _SLOT + 2] = b"\0\0"
        self._free.append(before)

    def remove(self, attempt_id: str) -> None:
        """Forget a claim, when its locks have been given back."""
        slot = self._slots.pop(attempt_id, None)
        if slot is not None and self._map is not None:
            self._map[slot * _SLOT : slot * _SLOT + 2] = b"\0\0"
            self._free.append(slot)

    def _open(self) -> None:
        self._opened = True
        try:
            path = folder() / process_name(os.getpid())
            with path.open("w+b") as file:
                file.truncate(_SLOT * _SLOTS)
                self._map = mmap.mmap(file.fileno(), _SLOT * _SLOTS)
            self._free = list(range(_SLOTS))
        except (OSError, ValueError) as error:
            logger.debug("no journal, so only leases free the locks of a killed process: %s", error)


def folder() -> Path:
    """Where the processes that can see each other keep their journals.

    By boot and pid namespace: a process of another container is not ours to call dead.

    Raises:
        OSError: there is no /proc, or the folder cannot be made or belongs to somebody else.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    space = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    path = Path(tempfile.gettempdir()) / f"relock-{os.getuid()}" / f"{boot}-{space}-{_FORMAT}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if path.parent.stat().st_uid != os.getuid():
        raise OSError(f"{path.parent} belongs to somebody else")
    return path


def process_name(pid: int) -> str:
    """`<pid>-<start time>`: a pid is used again, together with the start it is not.

    Raises:
        OSError: there is no such process.
    """
    stat = Path(f"/proc/{pid}/stat").read_text()
    # The name of the program is in brackets and may hold anything (proc(5)); start is field 22.
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def alive(name: str) -> bool:
    """Whether the process with this `process_name` runs. A zombie does not: it can do no more.

    Raises:
        OSError: it cannot be told. To take it for dead would free its locks under it.
    """
    pid = name.partition("-")[0]
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return f"{pid}-{stat[19]}" == name and stat[0] not in "ZX"


def read(path: Path) -> Iterator[Entry]:
    """The claims in a process's journal, which may be broken off anywhere."""
    with contextlib.suppress(FileNotFoundError):  # anything else must not look like an empty one
        data = path.read_bytes()
        for start in range(0, len(data), _SLOT):
            length = int.from_bytes(data[start : start + 2], "big")
            record = data[start + 2 : start + 2 + length]
            if 0 < length <= _SLOT - 2 and len(record) == length:
                backend, execution_id, attempt_id, *rest = record.decode(errors="replace").split(
                    "\n"
                )
                with contextlib.suppress(ValueError):  # of another version, or overwritten
                    owner, task, task_id, heirs, keep, *names = rest
                    told = owner, task, task_id, heirs, float(keep)
                    yield Entry(backend, execution_id, attempt_id, tuple(names), *told)


journal = Journal()
os.register_at_fork(after_in_child=journal._reset)
