"""What would hurt, said before it does: `celery -A app relock doctor`.

    report = examine(app)
    for finding in report.findings:
        print(finding.severity, finding.what, finding.do)

Looks at the settings, at each server of the locks, at the workers, and at what is parked. Changes
nothing. `quick` is the part without workers, for a check that is run often.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import metadata
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from . import engines
from .declaration import declaration, engine_of, is_locked, locked_tasks
from .engine.events import duration
from .engine.examination import Examinable, Memory, ParkedRun, Server
from .engine.protocol import DEBOUNCE
from .errors import LockConfigError, LockUnavailable, RelockError
from .options import OPTION_NAMES
from .settings import SETTINGS, option_defaults, store_settings
from .worker import company, parking
from .worker.report import key_of

if TYPE_CHECKING:
    from .engine.engine import Engine

ERROR, WARNING, NOTICE = SEVERITIES = ("error", "warning", "notice")

# From here on it is worth a word: seconds of a round trip, seconds between two clocks, the share of
# its memory that a server has used, and bytes that our keys take.
_SLOW, _VERY_SLOW, _APART = 0.02, 1.0, 1.0
_FULL, _LARGE = 0.9, 256 * 2**20
# Keys of each server that are looked at, and parked tasks.
_SAMPLE, _PARKED = 20_000, 200
# What is owed for so many seconds, nobody comes for.
_OWED = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that hurts, or will.

    Attributes:
        check: what was looked at, a word for programs.
        severity: "error": locks do not work, or what waits may be lost; "warning": it will hurt one
            day; "notice": good to know.
        what, why, do: what is the matter, why it matters, what to do about it.
    """

    check: str
    severity: str
    what: str
    why: str
    do: str


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, the worst first, and what was seen.

    Attributes:
        facts: by topic, plain values: for people who look for something else.
    """

    findings: tuple[Finding, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> str:
        """The severity of the worst finding, "" without one."""
        return self.findings[0].severity if self.findings else ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def examine(
    app: Any = None,
    place: Any = None,
    namespace: str = engines.NAMESPACE,
    *,
    workers: bool = True,
    timeout: float = 1.0,
) -> Report:
    """Look at everything.

    Args:
        app: the Celery app; None looks at the Redis alone.
        place: without an app, whatever `Lock` takes: a URL, or a client of redis-py.
        namespace: of a place.
        workers: whether to ask the workers, which takes `timeout`, or a little more.
        timeout: seconds that workers have to answer.
    """
    findings: list[Finding] = []
    facts: dict[str, Any] = {"version": metadata.version("celery-relock")}
    if app is not None:
        findings += _settings(app)
    engine = _engine(app, place, namespace, findings)
    asked = _Workers.ask(app, timeout, findings) if app is not None and workers else None
    if asked is not None:
        facts["workers"] = asked.told
        findings += asked.judge(app, engine)
    if engine is not None:
        findings += _backend(app, engine, asked, facts)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(tuple(dict.fromkeys(findings)), facts)


def quick(app: Any) -> tuple[Finding, ...]:
    """The settings, and how the servers are set up: some round trips, no worker, no scan."""
    findings = list(_settings(app))
    engine = _engine(app, None, "", findings)
    if engine is not None and isinstance(engine.backend, Examinable):
        try:
            findings += _of_servers(engine.backend.examination().servers(), {})
        except RelockError as error:
            findings.append(_unreachable(error))
    return tuple(findings)


# -- The app ---------------------------------------------------------------------------------------


def _settings(app: Any) -> Iterator[Finding]:
    try:
        option_defaults(app)
        store_settings(app)
    except LockConfigError as error:
        yield Finding(
            "settings",
            ERROR,
            str(error),
            "No locked task can run with it.",
            "Correct the setting; docs/settings.md has all of them.",
        )
        return
    known = [f"relock_{name}" for name in (*SETTINGS, *OPTION_NAMES)]
    for name in _written(app):
        close = get_close_matches(name.lower().removeprefix("celery_"), known, 1, cutoff=0.85)
        if close and not name.lower().removeprefix("celery_").startswith("relock_"):
            yield Finding(
                "settings",
                WARNING,
                f"the setting {name} looks like {close[0]}, and nothing reads it",
                "The default is in force instead.",
                f"Write {close[0]}.",
            )
    for name in _in_django(app):
        yield Finding(
            "settings",
            WARNING,
            f"the Django setting {name} is not read by this app",
            f"Its namespace is {app.conf.prefix!r}: the default is in force instead.",
            f"Write {app.conf.prefix}{name}.",
        )
    yield from _tasks(app)


def _written(app: Any) -> list[str]:
    return [str(name) for name in app.conf if isinstance(name, str)]


def _in_django(app: Any) -> list[str]:
    django = sys.modules.get("django.conf")
    prefix = app.conf.prefix or ""
    if django is None or not prefix or not django.settings.configured:
        return []
    return [name for name in dir(django.settings) if name.startswith("RELOCK_")]


def _tasks(app: Any) -> Iterator[Finding]:
    try:
        app.loader.import_default_modules()
        app.finalize()
        for task in app.tasks.values():
            if is_locked(type(task)):
                declaration(type(task))
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
        yield Finding(
            "tasks",
            ERROR,
            f"the app's tasks cannot be loaded: {type(error).__name__}: {error}",
            "A worker fails like this at its start.",
            "Correct the declaration, or the module that fails.",
        )
        return
    for task in app.tasks.values():
        if written := company.lacks_base(task):
            yield Finding(
                "tasks",
                ERROR,
                f"the task {task.name} is declared with {', '.join(written)} and takes no lock",
                "Its base is not LockedTask, so it runs beside itself.",
                f"Write @app.task(base=LockedTask, {written[0]}=…).",
            )
    if str(app.conf.result_backend).partition(":")[0] == "rpc" and (
        waited := [name for name in _debounced(app) if not app.tasks[name].ignore_result]
    ):
        yield Finding(
            "bursts",
            WARNING,
            f"{', '.join(waited)}: the calls of a burst have one result, and result_backend is "
            "rpc://",
            "The result goes to the process of the last call: get() in the others never returns.",
            "Use a result backend that stores results, such as Redis, or ignore_result=True.",
        )


def _debounced(app: Any) -> list[str]:
    return [each.options.task for each in locked_tasks(app) if each.options.debounce]


def _engine(app: Any, place: Any, namespace: str, findings: list[Finding]) -> Engine | None:
    try:
        return engines.engine_for(place, namespace) if app is None else engine_of(app)
    except LockConfigError as error:
        if not any(str(error) == each.what for each in findings):
            findings.append(_unreachable(error))
        return None


# -- The servers -----------------------------------------------------------------------------------


def _backend(
    app: Any, engine: Engine, workers: _Workers | None, facts: dict[str, Any]
) -> Iterator[Finding]:
    if not isinstance(engine.backend, Examinable):
        return
    asks = engine.backend.examination()
    try:
        yield from _of_servers(asks.servers(), facts)
        yield from _permissions(asks.refused())
        memory = asks.memory(_SAMPLE)
        yield from _memory(memory, facts)
        if not asks.is_used():
            yield _unused(memory)
            return
        parked = asks.parked(_PARKED)
        facts["parked_sample"] = [run._asdict() for run in parked]
        yield from _parked(app, engine, workers, parked)
        if app is not None and workers is not None and workers.told:
            yield from _bursts(app, workers, parked)
        for owed in asks.owed({run.home for run in parked}):
            if owed.since > _OWED:
                yield Finding(
                    "parked",
                    ERROR,
                    f"{owed.runs} parked tasks have had their turn, and no process has published "
                    f"them for {duration(owed.since)}",
                    "Their locks are free, or held by others, and they do not run.",
                    "Start a worker of their app: with this library, and with the same broker_url "
                    "and name of the app as when they were parked.",
                )
    except RelockError as error:
        yield _unreachable(error)


def _unreachable(error: RelockError) -> Finding:
    return Finding(
        "redis",
        ERROR,
        str(error),
        "No lock can be acquired; tasks do what lock_on_unavailable says.",
        "See that Redis runs, that relock_url leads to it, and its log."
        if isinstance(error, LockUnavailable)
        else "Correct relock_url, or what the sentence names.",
    )


def _of_servers(servers: list[Server], facts: dict[str, Any]) -> Iterator[Finding]:
    facts["servers"] = [
        {
            "version": server.info.get("redis_version", ""),
            "role": server.info.get("role", ""),
            "clock_ahead": round(server.clock[0], 4),
            "round_trip": round(median(server.trips), 6) if server.trips else None,
        }
        for server in servers
    ]
    for server in servers:
        for check in _CHECKS:
            yield from check(server)
    clocks = [server.clock[0] for server in servers]
    if clocks and max(clocks) - min(clocks) > _APART:
        yield Finding(
            "clock",
            WARNING,
            f"the clocks of the servers are {max(clocks) - min(clocks):.1f} s apart",
            "After a failover to a clock that is behind, fencing tokens may repeat.",
            "Let NTP keep all of them.",
        )


def _version(server: Server) -> Iterator[Finding]:
    version = server.info.get("redis_version", "")
    parts = version.split(".")
    if len(parts) > 1 and tuple(map(int, parts[:2])) < (6, 2):
        yield Finding(
            "version",
            ERROR,
            f"the server is Redis {version}",
            "It lacks commands that locks need.",
            "Use Redis 6.2 or newer, or Valkey.",
        )


def _role(server: Server) -> Iterator[Finding]:
    if server.info.get("role") == "slave":
        yield Finding(
            "role",
            ERROR,
            "relock_url leads to a replica",
            "It takes no writes, so no lock can be acquired.",
            "Give the address of the master, or those of the Sentinels.",
        )


def _eviction(server: Server) -> Iterator[Finding]:
    policy = server.info.get("maxmemory_policy", "noeviction")
    bounded = server.info.get("maxmemory", "0") != "0"
    if policy != "noeviction":
        yield Finding(
            "eviction",
            ERROR if bounded else WARNING,
            f"maxmemory-policy is {policy}"
            + ("" if bounded else ", though maxmemory is not set so far"),
            "When its memory is full, Redis throws away locks that are held, and parked tasks.",
            "CONFIG SET maxmemory-policy noeviction, and in redis.conf. A cache needs a Redis of "
            "its own.",
        )


def _full(server: Server) -> Iterator[Finding]:
    most, used = (int(server.info.get(name, 0)) for name in ("maxmemory", "used_memory"))
    if most and used > _FULL * most:
        yield Finding(
            "memory",
            WARNING,
            f"{used * 100 // most} % of maxmemory ({most // 2**20} MB) are in use",
            "When it is full, nobody can acquire a lock, and no run can be parked.",
            "Give it more memory, or see below what takes it up.",
        )


def _persistence(server: Server) -> Iterator[Finding]:
    if server.info.get("aof_enabled") == "0" and server.saves == "":
        yield Finding(
            "persistence",
            WARNING,
            "the server keeps nothing on disk",
            "Parked tasks are gone when it restarts: their messages are nowhere else.",
            "Turn appendonly on, or use lock_on_conflict='retry', which leaves messages to the "
            "broker.",
        )
    for name, what in (("rdb_last_bgsave_status", "save"), ("aof_last_write_status", "append")):
        if server.info.get(name, "ok") != "ok":
            yield Finding(
                "persistence",
                ERROR,
                f"the server could not {what} to its disk ({name} is not ok)",
                "By default it takes no writes then, so no lock can be acquired.",
                "See its log: the disk is full, or the folder may not be written to.",
            )


def _clock(server: Server) -> Iterator[Finding]:
    ahead, about = server.clock
    if abs(ahead) - about > _APART:
        side = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            "clock",
            WARNING,
            f"the server's clock is {abs(ahead):.1f} s {side} this machine's",
            "Locks go by the server's clock alone; but times that people are shown, lock_max_wait "
            "of parked tasks and the countdowns of retries go by those of both.",
            "Let NTP keep both.",
        )


def _latency(server: Server) -> Iterator[Finding]:
    if not server.trips:
        return
    usual, longest = median(server.trips), server.trips[-1]
    if usual > _SLOW or longest > _VERY_SLOW:
        yield Finding(
            "latency",
            WARNING,
            f"a round trip takes {usual * 1000:.0f} ms, the longest of {len(server.trips)} took "
            f"{longest * 1000:.0f} ms",
            "An uncontended lock costs two; and a renewal has to come through within two thirds of "
            "lock_ttl.",
            "Put Redis nearer to the workers; see SLOWLOG and LATENCY DOCTOR.",
        )


def _connections(server: Server) -> Iterator[Finding]:
    used, most = (int(server.info.get(name, 0)) for name in ("connected_clients", "maxclients"))
    if most and used > _FULL * most:
        yield Finding(
            "connections",
            WARNING,
            f"{used} of {most} connections (maxclients) are in use",
            "Without one, no lock can be acquired.",
            "Raise maxclients. A worker process needs three.",
        )


def _replicas(server: Server) -> Iterator[Finding]:
    there = int(server.info.get("connected_slaves", server.needed))
    if there < server.needed:
        yield Finding(
            "replicas",
            ERROR,
            f"the server has {there} replicas, and relock_min_replicas is {server.needed}",
            "While that is so, no lock can be acquired.",
            "Bring the replicas back, or lower relock_min_replicas.",
        )


_CHECKS: tuple[Callable[[Server], Iterator[Finding]], ...] = (
    *(_version, _role, _eviction, _full, _persistence, _clock, _latency, _connections, _replicas),
)


# What locks go on without, slower; and what only a doctor wants to know.
_SLOWER = ("+publish", "+subscribe", "+spublish", "+ssubscribe", "+ping")
_CURIOUS = ("+info", "+config|get", "+scan", "+dbsize", "+memory|usage")


def _permissions(refused: list[str]) -> Iterator[Finding]:
    for what in refused:
        if what in _CURIOUS:
            yield Finding(
                "permissions",
                NOTICE,
                f"the Redis user lacks {what}",
                "Locks need it not, but `relock doctor`, `ls` and `stats` see less, and a worker "
                "does not warn of a server that may lose parked tasks.",
                f"ACL SETUSER … {what}",
            )
        elif what in _SLOWER or what.startswith("&"):
            yield Finding(
                "permissions",
                WARNING,
                f"the Redis user lacks {what}",
                "Waiters do not hear of a grant: they find out by their heartbeat, seconds later. "
                "A lock that is lost is noticed late."
                if what != "+ping"
                else "A connection that was silent for 15 s cannot be looked at, and is given up.",
                f"ACL SETUSER … {what}",
            )
        else:
            yield Finding(
                "permissions",
                ERROR,
                f"the Redis user lacks {what}",
                "Tasks fail with LockConfigError as soon as they need it.",
                f"ACL SETUSER … {what}; docs/redis.md has the whole list.",
            )


def _memory(memory: Memory | None, facts: dict[str, Any]) -> Iterator[Finding]:
    if memory is None:
        return
    share = memory.keys / memory.seen if memory.seen else 1.0
    kinds: list[dict[str, Any]] = [
        {
            "kind": kind.name,
            "keys": round(kind.keys * max(share, 1.0)),
            "bytes": round(kind.keys * max(share, 1.0) * kind.bytes_each),
        }
        for kind in memory.kinds
    ]
    kinds.sort(key=lambda each: -each["bytes"])
    facts["memory"] = {
        "keys": memory.keys,
        "sampled": min(memory.seen, memory.keys),
        "kinds": kinds,
        "other_namespaces": list(memory.namespaces),
    }
    total = sum(each["bytes"] for each in kinds)
    if total > _LARGE:
        most = kinds[0]
        yield Finding(
            "memory",
            NOTICE,
            f"locks take about {total / 2**20:.0f} MB, most of it {most['kind']}: "
            f"{most['keys']} keys",
            "When maxmemory is reached nobody can acquire a lock.",
            "Ended executions are remembered for an hour; parked messages are as large as what was "
            "sent: pass ids instead of documents.",
        )


def _unused(memory: Memory | None) -> Finding:
    others = ", ".join(memory.namespaces) if memory else ""
    return Finding(
        "namespace",
        WARNING if others else NOTICE,
        "no lock was ever acquired in this namespace"
        + (f"; in this database there are the namespaces {others}" if others else ""),
        "Processes with different namespaces do not exclude each other.",
        "If workers have run, compare relock_namespace and relock_url with theirs.",
    )


# -- The workers -----------------------------------------------------------------------------------

_Told: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Workers:
    """What the workers told.

    Attributes:
        told: of those that have the library, by the name of the worker (see `bootstep.Locks.info`).
        tasks, queues: of all workers.
    """

    told: dict[str, _Told]
    tasks: dict[str, list[str]]
    queues: dict[str, list[str]]

    @classmethod
    def ask(cls, app: Any, timeout: float, findings: list[Finding]) -> _Workers | None:
        """Ask all of them. None if they cannot be asked, which is a finding."""
        try:
            stats = app.control.inspect(timeout=timeout).stats() or {}
            # From here on it is known how many there are, and nobody has to wait for more.
            inspect = app.control.inspect(timeout=timeout, limit=len(stats))
            tasks = inspect.registered() if stats else {}
            queues = inspect.active_queues() if stats else {}
        except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
            findings.append(
                Finding(
                    "workers",
                    WARNING,
                    f"the workers cannot be asked: {type(error).__name__}: {error}",
                    "The broker cannot be reached, or knows no broadcasts.",
                    "See that broker_url leads to it.",
                )
            )
            return None
        if not stats:
            findings.append(
                Finding(
                    "workers",
                    WARNING,
                    f"no worker has answered within {timeout:g} s",
                    "Without one nothing runs, and no parked task is resumed.",
                    "Start one; or give busy ones more time with --timeout.",
                )
            )
        return cls(
            {name: each["relock"] for name, each in stats.items() if "relock" in each},
            {name: (tasks or {}).get(name, []) for name in stats},
            {name: [queue["name"] for queue in (queues or {}).get(name, ())] for name in stats},
        )

    def judge(self, app: Any, engine: Engine | None) -> Iterator[Finding]:
        own = {declared.options.task for declared in locked_tasks(app)}
        for name in self.tasks.keys() - self.told.keys():
            if unlocked := sorted(own & {task.partition(" ")[0] for task in self.tasks[name]}):
                yield Finding(
                    "workers",
                    ERROR,
                    f"the worker {name} runs {', '.join(unlocked)} without a lock",
                    "It has not loaded celery-relock, or an older version of your code, in which "
                    "these tasks are not locked: they run beside those of other workers.",
                    "Deploy the same code everywhere, and restart it.",
                )
        for name, told in sorted(self.told.items()):
            yield from _compared(name, told, app, engine)
        versions = {str(told.get("version")) for told in self.told.values()}
        if versions - {metadata.version("celery-relock")}:
            yield Finding(
                "workers",
                WARNING,
                f"celery-relock is {metadata.version('celery-relock')} here, and "
                f"{', '.join(sorted(versions))} in the workers",
                "Versions of one layout work together; those of another refuse to start.",
                "Finish the deploy.",
            )


def _compared(name: str, told: _Told, app: Any, engine: Engine | None) -> Iterator[Finding]:
    if problem := told.get("problem"):
        yield Finding(
            "workers",
            ERROR,
            f"the worker {name} has no locks: {problem}",
            "Its locked tasks fail, and it resumes no parked tasks.",
            "Correct its settings, and restart it.",
        )
        return
    here = store_settings(app).namespace if engine is not None else told.get("namespace")
    if told.get("namespace") != here:
        yield Finding(
            "workers",
            ERROR,
            f"the worker {name} has relock_namespace={told.get('namespace')!r}, and here it is "
            f"{here!r}",
            "The two do not exclude each other.",
            "Give both the same, and restart them.",
        )
    elif engine is not None and told.get("backend") != engine.backend.id:
        yield Finding(
            "workers",
            WARNING,
            f"the worker {name} has its locks at another address",
            "If that is another Redis, or another database, the two do not exclude each other.",
            "Give both the same relock_url.",
        )
    for task, key in sorted((told.get("tasks") or {}).items()):
        found = app.tasks.get(task)
        own = key_of(declaration(type(found)).options.key) if is_locked(type(found)) else key
        if own != key:
            yield Finding(
                "workers",
                ERROR,
                f"the worker {name} has lock_key={key} for {task}, and here it is {own}",
                "Runs of the two have different lock names, and do not exclude each other.",
                "Deploy the same code everywhere, and restart it.",
            )


def _parked(
    app: Any, engine: Engine, workers: _Workers | None, runs: Iterable[ParkedRun]
) -> Iterator[Finding]:
    if app is None:
        return
    own, of_others = parking.home(app), set()
    unserved: dict[str, ParkedRun] = {}
    for run in runs:
        if run.home != own:
            if not (run.lock.startswith(DEBOUNCE) and workers and workers.told):  # see `_bursts`
                of_others.add(run.task)
            continue
        consumed = workers is None or any(run.queue in each for each in workers.queues.values())
        if run.queue and not consumed:
            beside = parking.channel(run.home, parking.resume_queue(run.queue))
            if not engine.backend.consumed(beside):
                unserved.setdefault(run.queue, run)
    for queue, run in sorted(unserved.items()):
        yield Finding(
            "parked",
            ERROR,
            f"runs of the queue {queue!r} are parked, such as {run.task}[{run.task_id}] for the "
            f"lock {run.lock!r}, and no worker that answers consumes it",
            "When their turn comes they are published to a queue that nobody reads, and hold up "
            "those behind them for a minute.",
            f"Start a worker with -Q {queue}, or cancel them: celery relock cancel {run.task_id}",
        )
    if of_others:
        yield Finding(
            "parked",
            NOTICE,
            f"runs of {', '.join(sorted(of_others))} are parked by another app, or for another "
            "broker",
            "This app's workers cannot resume them.",
            "That is as it should be if that app has workers of its own. After a change of "
            "broker_url, or of the app's name, start a worker with the old one until none is left.",
        )


def _bursts(app: Any, workers: _Workers, runs: Iterable[ParkedRun]) -> Iterator[Finding]:
    """Bursts are written by their callers; other parked tasks by a worker, which can send them."""
    own, homes = parking.home(app), {told.get("home") for told in workers.told.values()}
    unsent = {run.task: run for run in runs if run.lock.startswith(DEBOUNCE)}
    unsent = {task: run for task, run in unsent.items() if run.home not in homes}
    alike = (
        "Give every process the same broker_url (or broker_write_url), letter by letter but for "
        "the password, and every Celery() the same name."
    )
    if own not in homes and (debounced := _debounced(app)):
        yield Finding(
            "bursts",
            ERROR,
            f"no worker that answers sends the bursts of {', '.join(debounced)} that begin here",
            "The broker's URL or the app's name is another text here than in the workers, so "
            "nobody knows whether they are the same: these calls wait, and never run.",
            alike,
        )
    for task, run in sorted(unsent.items()):
        yield Finding(
            "bursts",
            WARNING,
            f"no worker that answers sends the burst {task}[{run.task_id}]",
            "Its callers have another text for the broker's URL or the app's name than these "
            "workers. The calls wait, and never run, unless workers at another broker send them.",
            f"{alike} What waits already is sent by a worker that has the callers'.",
        )


def describe(report: Report) -> Iterator[str]:
    """The report as lines of text."""
    for finding in report.findings:
        yield f"{finding.severity.upper()}: {finding.what}"
        yield f"  why: {finding.why}"
        yield f"  do:  {finding.do}"
    facts: Mapping[str, Any] = report.facts
    for server in facts.get("servers", ()):
        trip = server["round_trip"]
        yield (
            f"server: Redis {server['version'] or '?'}, {server['role'] or '?'}, round trip "
            + (f"{trip * 1000:.2f} ms" if trip is not None else "?")
            + f", clock {server['clock_ahead']:+.3f} s"
        )
    if memory := facts.get("memory"):
        yield f"keys: {memory['keys']} in the database, {memory['sampled']} looked at"
        for kind in memory["kinds"]:
            yield f"  {kind['kind']}: about {kind['keys']} ({kind['bytes'] / 1024:.0f} kB)"
    for name, told in sorted(facts.get("workers", {}).items()):
        beside = ", ".join(told.get("beside") or ()) or "nothing known"
        yield (
            f"worker: {name}, celery-relock {told.get('version')}, "
            f"namespace {told.get('namespace')}, "
            f"locked tasks: {len(told.get('tasks') or ())}, beside {beside}"
        )
    worst = {name: sum(f.severity == name for f in report.findings) for name in SEVERITIES}
    yield ", ".join(f"{count} {name}s" for name, count in worst.items())
