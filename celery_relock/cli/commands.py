"""`ls`, `show`, `why`, `release`, `cancel`, `stats`."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from itertools import islice

import click

from ..admin import SHOWN, Holder, LockInfo, Waiter, Why
from ..admin.look import held_for, permits_in
from ..admin.names import plain, shown
from ..engine.events import duration
from ..engine.protocol import LINE, MARKER
from ..errors import LockConfigError, LockUnavailable, RelockError
from .base import AT_LEAST_0, FOUND, MOST, NOT_FOUND, Here, command, given, table

_MANY = 1000


@command
@click.argument("pattern", default="*")
@click.option(
    "--limit",
    type=AT_LEAST_0,
    default=_MANY,
    show_default=True,
    help="How many at most; 0 for all.",
)
@click.option("--dedup", is_flag=True, help="List the markers of lock_dedup instead of locks.")
def ls(here: Here, pattern: str, limit: int, dedup: bool) -> int:
    """List the locks that are held or waited for.

    PATTERN matches lock names, as in Redis: `account:*`, `?`, `[a-z]`. Quote it. A marker's name
    has its task before its lock: `*account:42`.
    """
    found = here.find(pattern, markers=dedup)
    locks = sorted(islice(found, limit or None), key=lambda lock: lock.name)
    is_cut = next(found, None) is not None
    document = {"locks": [lock.as_dict() for lock in locks], "cut": is_cut}
    here.show(document, rows_of(locks) if locks else _nothing(here, pattern, dedup))
    if is_cut and not here.json:
        click.echo(f"There are more than {limit}: --limit 0 lists all.", err=True)
    return FOUND if locks else NOT_FOUND


@command
@click.argument("name", callback=given)
@click.option(
    "--limit",
    type=AT_LEAST_0,
    default=SHOWN,
    show_default=True,
    help="Holders and waiters to show; 0 for all.",
)
def show(here: Here, name: str, limit: int) -> int:
    """Show who holds a lock, and who waits for it."""
    locks = here.locks.with_order(here.meant(name), limit or MOST)
    lock, line = locks[0], locks[1].as_dict() if len(locks) > 1 else None
    here.show({**lock.as_dict(), "order": line}, _shown_all(locks))
    return NOT_FOUND if _is_nothing(locks) else FOUND


@command
@click.argument("task_id", callback=given)
def why(here: Here, task_id: str) -> int:
    """Say why a task does not run, or what it does."""
    found = here.locks.why(here.locks.id_of(task_id))
    here.show(found.as_dict(), [plain(_with_full_stop(found.sentence))])
    return NOT_FOUND if found.state == "unknown" else FOUND


def _with_full_stop(sentence: str) -> str:
    """With a full stop, if what is quoted at its end has none."""
    return sentence if sentence.endswith((".", "!", "?", "…")) else f"{sentence}."


@command
@click.argument("name", callback=given)
@click.option(
    "--task", "task_id", callback=given, metavar="ID", help="Release only what this task holds."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def release(here: Here, name: str, task_id: str | None, yes: bool) -> int:
    """Release a lock by force.

    Its holders notice within a second, and the next waiters get the lock. Work that is under way is
    not stopped: it must look at `self.lock.lost`, or let the fencing token decide.
    """
    name = here.meant(name)
    task_id = task_id and here.locks.id_of(task_id)
    permits = None
    if not yes:
        if here.json or not sys.stdin.isatty():
            raise click.UsageError("give --yes: there is no terminal to ask at")
        locks = here.locks.with_order(name, 10)
        click.echo("\n".join(_shown_all(locks)))
        permits = permits_in(locks)
        is_held = permits is None or permits
        if _is_nothing(locks) or (is_held and not click.confirm("Release it by force?")):
            return NOT_FOUND
    released = here.locks.release(name, task_id, permits=permits)
    lines = [f"released: {shown(name)}, of {plain(str(holder))}" for holder in released]
    here.show(
        {"name": name, "released": [holder.as_dict() for holder in released]},
        lines
        or [f"nothing to release: {_why_nothing(shown(name), plain(task_id or ''), permits)}"],
    )
    return FOUND if released else NOT_FOUND


def _is_nothing(locks: list[LockInfo]) -> bool:
    """Whether nobody holds these, or waits for them, or they are not locks."""
    return all(each.idle or each.foreign for each in locks)


def _why_nothing(name: str, task_id: str, permits: Collection[str] | None) -> str:
    if task_id:
        return f"the task {task_id} does not hold it, or nobody holds '{name}'"
    return f"{'nobody of those shown' if permits else 'nobody'} holds '{name}'"


@command
@click.argument("task_ids", callback=given, metavar="TASK_ID...", nargs=-1, required=True)
def cancel(here: Here, task_ids: tuple[str, ...]) -> int:
    """Remove parked tasks from their queues, and store REVOKED as their state.

    A task whose message an ordered line waits for is revoked, and the line goes on.
    """
    cancelled: list[str] = []
    others: list[Why] = []
    failed: dict[str, str] = {}
    stopped: RelockError | None = None
    task_ids = tuple(map(here.locks.id_of, task_ids))
    for number, task_id in enumerate(task_ids):
        try:
            if here.locks.cancel(task_id):
                cancelled.append(task_id)
            else:
                others.append(here.locks.why(task_id))
        except (LockConfigError, LockUnavailable) as error:
            if not number:
                raise
            # So it would be with the others. What was done is told first.
            failed |= dict.fromkeys(task_ids[number:], str(error))
            stopped = error
            break
        except RelockError as error:
            failed[task_id] = str(error)
    lines = [f"cancelled: {task_id}" for task_id in cancelled]
    lines += [f"not parked: {_with_full_stop(each.sentence)}" for each in others]
    lines += [f"failed: {task_id}: {text}" for task_id, text in failed.items()]
    if any(each.state in ("holds", "waits", "runs") for each in others):
        lines.append(
            "What a worker runs is ended by: celery -A APP control terminate SIGTERM TASK_ID"
        )
    if any(each.state == "received" for each in others):
        lines.append("What waits in a worker is ended by: celery -A APP control revoke TASK_ID")
    not_parked = [each.as_dict() for each in others]
    document = {"cancelled": cancelled, "not_parked": not_parked, "failed": failed}
    here.show(document, map(plain, lines))
    if stopped is not None:
        raise stopped
    return NOT_FOUND if others or failed else FOUND


@command
def stats(here: Here) -> int:
    """Count locks, holders and waiters."""
    found = here.locks.stats()
    longest = duration(found.oldest_wait)
    lines = [
        f"locks     {found.locks}: {found.held} held, {found.contended} waited for",
        f"holders   {found.holders}",
        f"waiting   {found.waiting}: {found.parked} of them parked",
        f"longest   {longest}, for {shown(found.oldest_wait_lock)}" if found.oldest_wait else "",
        f"markers   {found.markers} of lock_dedup",
        f"bursts    {found.bursts} of lock_debounce" if found.bursts else "",
        f"foreign   {found.foreign} keys that are not ours" if found.foreign else "",
    ]
    here.show(found.as_dict(), filter(None, lines))
    return FOUND


def rows_of(locks: list[LockInfo]) -> list[str]:
    """A table with a line for each lock."""
    head = ("LOCK", "HELD BY", "FOR", "WAITING", "PARKED")
    return table(head, [_row(lock) for lock in locks], head[2:])


def _row(lock: LockInfo) -> tuple[object, ...]:
    if lock.foreign:
        return shown(lock.name), "(not a lock: somebody else's key)", "", "", ""
    if not lock.holders:
        return shown(lock.name), "-", "", lock.waiting, lock.parked
    first = lock.holders[0]
    more = f" +{lock.held - 1}" if lock.held > 1 else ""
    held = held_for(lock, first)
    kept = " (queued)" if lock.name.startswith(MARKER) else " (kept)"
    state = kept if first.kept else " (cools down)" if first.cooldown else ""
    by = (first.task or "?") + more + state
    return shown(lock.name), by, held, lock.waiting, lock.parked


def _nothing(here: Here, pattern: str, dedup: bool) -> list[str]:
    kind, who = "lock", "nobody holds or waits for one"
    if dedup:
        kind, who = "marker", "no call is marked"
    what = f"no {kind}s" if pattern == "*" else f"no {kind} like {pattern!r}"
    return [f"{what}: {who} in the namespace {here.locks.namespace!r}"]


def _shown_all(locks: list[LockInfo]) -> Iterator[str]:
    for number, lock in enumerate(locks):
        if number:
            yield ""
        yield from _shown(lock)


def _shown(lock: LockInfo) -> Iterator[str]:
    name = shown(lock.name)
    if lock.foreign:
        yield f"{name} is not a lock: the key of this name is in use for something else"
        return
    if lock.idle:
        yield f"nobody holds '{name}' or waits for it"
        return
    yield f"{name}: {lock.held} holding, {lock.waiting} waiting, {lock.parked} of them parked"
    if lock.holders:
        yield ""
        yield "held by"
    for holder in lock.holders:
        yield from _holder_lines(holder, lock)
    if lock.held > len(lock.holders):
        yield f"  … and {lock.held - len(lock.holders)} more"
    if lock.waiters:
        yield ""
        yield "waiting"
        rows = [_waiter_row(waiter, lock.at) for waiter in lock.waiters]
        yield from table(("", "STATE", "FOR", "TASK ID", "TASK"), rows, ("STATE", "FOR", "TASK ID"))
    if lock.waiting > len(lock.waiters):
        yield f"  … and {lock.waiting - len(lock.waiters)} more"


def _holder_lines(holder: Holder, lock: LockInfo) -> Iterator[str]:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    yield f"  {plain(str(holder))}"
    how = "shared without a break since" if holder.shared else "since"
    held = duration(lock.at - holder.since)
    if lock.name.startswith(LINE):
        how, held = "its place is of", f"{held} ago"
    yield f"    {how} {since} ({held}), lease {holder.lease_left:.0f} s left"
    if holder.cooldown:
        yield "    is over: the lock cools down until the lease ends (lock_cooldown)"
    elif holder.pause:
        yield "    calls are merged until the lease ends; then one is sent (lock_debounce)"
    elif lock.name.startswith(MARKER):
        yield f"    marks a call that {'is queued' if holder.kept else 'runs'} (lock_dedup)"
    elif holder.kept:
        yield "    kept for the next step, or the retry, of its workflow"
    else:
        yield f"    process {holder.pid} of {plain(holder.host)}"
    yield f"    token {holder.token}, owner {plain(holder.owner)}"


def _waiter_row(waiter: Waiter, at: float) -> tuple[object, ...]:
    waits = duration(at - waiter.since)
    state = f"{waiter.state}, shared" if waiter.shared else waiter.state
    return f"  {waiter.position}", state, waits, waiter.task_id or "-", waiter.task
