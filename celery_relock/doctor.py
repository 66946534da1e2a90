"""Find problems before they hurt: `celery -A app relock doctor`.

    report = examine(app)
    for finding in report.findings:
        print(finding.severity, finding.what, finding.do)

The doctor looks at the settings, the servers of the locks, the workers and the parked tasks, and
changes nothing. `quick` looks at the settings and the servers, for a check that runs often.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from . import engines
from .declaration import engine_of, locked_tasks, misnamed
from .engine import diagnosis
from .engine.diagnosis import ERROR, NOTICE, SEVERITIES, WARNING, Finding
from .engine.events import duration
from .engine.inspection import Inspectable, Memory, ParkedTask, Plain
from .engine.protocol import DEBOUNCE
from .errors import SITE, LockConfigError, LockUnavailable, RelockError
from .settings import (
    KNOWN,
    backend_settings,
    enabled,
    name_prefix,
    plain_names,
    read_by_tasks,
    visibility_timeout,
)
from .version import __version__
from .worker import broker, company, parking
from .worker.report import key_of

if TYPE_CHECKING:
    from .engine.engine import Engine

__all__ = ["Finding", "Report", "examine", "quick"]

# Bytes of our keys from which there is a finding.
_LARGE = 256 * 2**20
# kombu's transports that deliver a message again some time after they delivered it first.
_BY_THE_CLOCK = ("redis", "rediss", "sentinel", "sqs")
# Round trips to each server to time, keys of it to look at, and parked tasks.
_TRIPS, _SAMPLE, _PARKED = 20, 20_000, 200
# Seconds for which a message can be owed: for longer, no process publishes it.
_OWED = 60.0
# How often a message is handed out, 5 s, 15 s, 35 s … after its turn has come, until that is told.
_OFTEN = 4


@dataclass(frozen=True, slots=True)
class Report(Plain):
    """What the doctor found.

    Attributes:
        findings: all findings, the worst first.
        facts: by topic, plain values that describe the servers, the keys and the workers.
    """

    findings: tuple[Finding, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> str:
        """The severity of the worst finding; "" without a finding."""
        return self.findings[0].severity if self.findings else ""


def examine(
    app: Any = None,
    place: Any = None,
    namespace: str = engines.NAMESPACE,
    *,
    workers: bool = True,
    timeout: float = 1.0,
) -> Report:
    """Look at everything. Problems are findings: a Redis that cannot be reached is one, too.

    Args:
        app: the Celery app; None looks at a Redis alone.
        place: without an app, what `Lock` accepts: a URL, a redis-py client, or a function that
            returns a client.
        namespace: without an app, the prefix of all keys.
        workers: whether to ask the workers, which takes `timeout` seconds or a little more.
        timeout: seconds in which workers can answer.
    """
    findings: list[Finding] = []
    facts: dict[str, Any] = {"version": __version__}
    if app is not None:
        findings += _settings(app)
    engine = _engine(app, place, namespace, findings)
    asked = _Workers.ask(app, timeout, findings) if app is not None and workers else None
    if asked is not None:
        facts["workers"] = asked.told
        try:
            findings += asked.judge(app, engine)
        except LockConfigError as error:
            findings.append(_wrong_setting(error))
    if engine is not None:
        findings += _backend(app, engine, asked, facts)
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Report(tuple(dict.fromkeys(findings)), facts)


def quick(app: Any) -> tuple[Finding, ...]:
    """Look at the settings, and at how the servers are set up, in a few round trips.

    Args:
        app: the Celery app.
    """
    findings = list(_settings(app))
    engine = _engine(app, None, "", findings)
    if engine is not None and isinstance(engine.backend, Inspectable):
        try:
            findings += diagnosis.of_servers(engine.backend.examination().servers(_TRIPS))
        except RelockError as error:
            findings.append(_unreachable(error))
    return tuple(findings)


# -- The app ---------------------------------------------------------------------------------------


def _settings(app: Any) -> Iterator[Finding]:
    try:
        read_by_tasks(app)
        is_on = enabled(app)
        in_memory = is_on and backend_settings(app).in_memory
    except LockConfigError as error:
        yield _wrong_setting(error)
        return
    if not is_on:
        yield Finding(
            "settings",
            ERROR,
            "relock_enabled is False, so no task acquires a lock",
            "Executions with one lock name run at the same time.",
            "Remove the setting, except from the settings of tests.",
        )
    elif in_memory:
        yield Finding(
            "settings",
            ERROR,
            "relock_url is memory://, so each process has locks of its own",
            "Executions with one lock name run at the same time in two processes.",
            "Set relock_url to the URL of a Redis, except in the settings of tests.",
        )
    else:
        yield from _memory_of_ends(app)
    for name, plain in plain_names(app.conf).items():
        close = get_close_matches(plain, KNOWN, 1, cutoff=0.85)
        if close and not plain.startswith("relock_"):
            yield Finding(
                "settings",
                WARNING,
                f"the setting {name} looks like {close[0]}, but has no effect",
                "The default applies instead.",
                f"Write {close[0]}.",
            )
    for name in _in_django(app):
        yield Finding(
            "settings",
            WARNING,
            f"the Django setting {name} is not read by this app",
            f"The app's namespace is {app.conf.prefix!r}, so the default applies instead.",
            f"Write {app.conf.prefix}{name}.",
        )
    yield from _tasks(app)


def _memory_of_ends(app: Any) -> Iterator[Finding]:
    remember, after = backend_settings(app).remember, visibility_timeout(app.conf)
    if remember <= after and app.connection_for_read().transport_cls in _BY_THE_CLOCK:
        yield Finding(
            "settings",
            WARNING,
            f"relock_remember={remember:g} s is not longer than the visibility_timeout of the "
            f"broker, {after:g} s",
            "A message that the broker delivers again after that time may run a second time.",
            "Leave relock_remember out, or make it some minutes longer than visibility_timeout.",
        )


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
        locked_tasks(app)
    except Exception as error:  # noqa: BLE001 - whatever an import raises is the finding
        yield Finding(
            "tasks",
            ERROR,
            f"the app's tasks cannot be loaded: {type(error).__name__}: {error}",
            "A worker fails in the same way when it starts.",
            "Correct the declaration, or the module that fails.",
        )
        return
    for task in app.tasks.values():
        if written := company.lacks_base(task):
            yield Finding(
                "tasks",
                ERROR,
                f"the task {task.name} is declared with {', '.join(written)} and acquires no lock",
                "Its base is not LockedTask, so two executions can run at the same time.",
                f"Write @app.task(base=LockedTask, {written[0]}=…).",
            )
    for declared in locked_tasks(app):
        for each in misnamed(app.tasks[declared.options.task]):
            why = "Its lock has the default of that option."
            yield Finding("tasks", WARNING, each.text, why, f"Write {each.option}=….")
    yield from _limits(app)
    yield from _results(app)


def _limits(app: Any) -> Iterator[Finding]:
    """Tasks whose names are the same and whose limits differ."""
    limits: dict[str, dict[int, str]] = {}
    for each in locked_tasks(app):
        options = each.options
        if callable(options.limit) or options.mode != "exclusive":
            continue
        for number, name in each.templates_like_others(app.tasks[options.task]):
            limit = options.limit
            if not isinstance(limit, int):
                limit = options.limit_of_parts((number,))
            limits.setdefault(name, {}).setdefault(limit, options.task)
    for name, tasks in limits.items():
        if len(tasks) > 1:
            told = ", ".join(f"{task} has lock_limit={each}" for each, task in tasks.items())
            yield Finding(
                "tasks",
                ERROR,
                f"of the tasks with lock_key={name!r}, {told}",
                "The task with the higher limit runs beside one that expects to be alone.",
                "Give all tasks that use a lock name the same lock_limit.",
            )


def _results(app: Any) -> Iterator[Finding]:
    """What the result backend, or a setting of it, does to the results of locked tasks."""
    locked = [each.options for each in locked_tasks(app)]
    waited = [each for each in locked if not app.tasks[each.task].ignore_result]
    merged = [each.task for each in waited if each.debounce]
    shared = [each.task for each in waited if each.dedup and each.on_duplicate == "existing"]
    is_rpc = str(app.conf.result_backend).partition(":")[0] == "rpc"
    for tasks, check, which, whose in (
        (merged, "bursts", "the calls of a burst share", "the last call"),
        (shared, "tasks", "a duplicate shares", "the first call"),
    ):
        if tasks and is_rpc:
            yield Finding(
                check,
                WARNING,
                f"{', '.join(tasks)}: {which} one result, and result_backend is rpc://",
                f"The result goes to the process of {whose}, once: any other get() never returns.",
                "Use a result backend that stores results, such as Redis, or ignore_result=True.",
            )
    if locked and app.conf.worker_deduplicate_successful_tasks:
        yield Finding(
            "settings",
            WARNING,
            "worker_deduplicate_successful_tasks is on",
            "Late copies of locked tasks are discarded without it. With it, what comes after a "
            "copy can be sent without its workflow's lock and without its relock_prefix.",
            "Leave it out.",
        )


def _wrong_setting(error: LockConfigError) -> Finding:
    return Finding(
        "settings",
        ERROR,
        str(error),
        "No locked task can run with this setting.",
        f"Correct the setting: {SITE}settings.html lists them all.",
    )


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
    if not isinstance(engine.backend, Inspectable):
        if app is None:  # else the settings say so
            yield Finding(
                "redis",
                ERROR,
                "memory:// keeps the locks in the memory of each process",
                "Executions with one lock name run at the same time in two processes.",
                "Give the URL of a Redis.",
            )
        return
    try:
        asks = engine.backend.examination()
        servers = asks.servers(_TRIPS)
        facts["servers"] = [
            {
                "address": server.at,
                "version": server.info.get("redis_version", ""),
                "role": server.info.get("role", ""),
                "clock_ahead": round(server.clock[0], 4),
                "round_trip": round(median(server.trips), 6) if server.trips else None,
            }
            for server in servers
        ]
        yield from diagnosis.of_servers(servers)
        yield from _permissions(asks.refused())
        memory = asks.memory(_SAMPLE)
        yield from _memory(memory, facts)
        yield from _namespaces(memory, engine.backend.inspection().has_layout())
        parked = asks.parked_tasks(_PARKED)
        facts["parked_sample"] = [each._asdict() for each in parked]
        yield from _parked(app, engine, workers, parked)
        if app is not None and workers is not None and workers.told:
            yield from _bursts(app, workers, parked)
        for owed in asks.owed({run.home for run in parked}):
            if owed.since > _OWED:
                yield Finding(
                    "parked",
                    ERROR,
                    f"for {duration(owed.since)} no process has published {owed.messages} parked "
                    f"task{'' if owed.messages == 1 else 's'} whose turn has come",
                    "They do not run, although their locks are free or go to other tasks.",
                    "Start a worker of their app with this library, and with the broker_url and "
                    "the app name with which they were parked.",
                )
    except RelockError as error:
        yield _unreachable(error)


def _unreachable(error: RelockError) -> Finding:
    if isinstance(error, LockUnavailable):
        why = "Locks there cannot be acquired; tasks do what lock_on_unavailable says."
        do = "Look at what the first line names, whether relock_url leads there, and at its log."
    else:
        why = "No lock can be acquired; tasks fail with LockConfigError."
        do = "Correct relock_url, or whatever the first line names."
    return Finding("redis", ERROR, str(error), why, do)


# Permissions without which waiters are not notified; and those that no lock needs, with what does.
_NOTIFIES = ("+publish", "+subscribe", "+spublish", "+ssubscribe")
_SETTINGS_OF_SERVERS = (
    "the doctor does not see how the server is set up, and a worker does not warn of one that can "
    "lose parked tasks"
)
_CURIOUS = {
    "+info": _SETTINGS_OF_SERVERS,
    "+config|get": _SETTINGS_OF_SERVERS,
    "+scan": "what looks at all locks fails: `relock ls`, `stats`, `watch`, `exporter`",
    "+pubsub": "while a client listens to a pattern of channels (PSUBSCRIBE), a waiter that has "
    "died is taken for one that lives, and is given the lock for the length of a lease",
    "+hscan": "a stamp that is revoked does not reach parked tasks",
    "+dbsize": "the doctor sees neither keys nor other namespaces",
    "+memory|usage": "the doctor does not see how large the keys are",
}


def _permissions(refused: list[str]) -> Iterator[Finding]:
    for what in refused:
        # Some managed servers have renamed CONFIG, for everybody.
        or_so = ", or the server has no such command" if what.startswith("+") else ""
        if what in _CURIOUS:
            severity = NOTICE
            why = f"Locks do not need this permission. But without it {_CURIOUS[what]}."
            more = "; where the server has renamed the command, nothing."
        elif what == "+ping":
            severity, more = WARNING, ""
            why = "A connection that was silent for 15 s cannot be tested, and is closed."
        elif what in _NOTIFIES or what.startswith("&"):
            severity, more = WARNING, ""
            why = (
                "Waiters are not notified of grants: they find out by a heartbeat, seconds later. "
                "A lost lock is noticed late."
            )
        else:
            severity = ERROR
            why = "Tasks that need this permission fail with LockConfigError."
            more = "; the docs list all, under 'A user and a password'."
        lacks = f"the Redis user lacks {what}{or_so}"
        yield Finding("permissions", severity, lacks, why, f"ACL SETUSER … {what}{more}")


def _memory(memory: Memory | None, facts: dict[str, Any]) -> Iterator[Finding]:
    if memory is None:
        return
    share = max(memory.keys / memory.seen, 1.0) if memory.seen else 1.0
    kinds: list[dict[str, Any]] = [
        {
            "kind": kind.name,
            "keys": round(kind.keys * share),
            "bytes": round(kind.keys * share * kind.bytes_each),
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
            f"locks use about {total / 2**20:.0f} MB, most of it for {most['kind']}: "
            f"{most['keys']} keys",
            "When maxmemory is reached, no lock can be acquired.",
            "Ended executions are remembered for relock_remember seconds. Parked messages are as "
            "large as the arguments of their calls: pass ids instead of documents.",
        )


def _namespaces(memory: Memory | None, is_known: bool) -> Iterator[Finding]:
    others = ", ".join(memory.namespaces) if memory else ""
    if not is_known and not (memory and memory.kinds):
        yield Finding(
            "namespace",
            WARNING if others else NOTICE,
            "no lock was ever acquired in this namespace"
            + (f"; in this database there are the namespaces {others}" if others else ""),
            "Processes with different namespaces do not exclude each other.",
            "If workers have run, compare relock_namespace and relock_url with theirs.",
        )
    elif others:
        yield Finding(
            "namespace",
            NOTICE,
            f"in this database there are other namespaces, too: {others}",
            "Processes with different namespaces do not exclude each other.",
            "If one of them is a web process or a script of this program, give it "
            "relock_namespace, or the namespace= of its Lock. If this program has had another one, "
            "what is parked there waits for a worker that has it still.",
        )


# -- The workers -----------------------------------------------------------------------------------

_Told: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Workers:
    """The answers of the workers.

    Attributes:
        told: what workers with the library say about it, by worker name (`bootstep.Locks.info`).
        tasks: the registered tasks of every worker.
        queues: the queues that any of them consumes.
        is_whole: whether every worker that answered has told all of this.
    """

    told: dict[str, _Told]
    tasks: dict[str, list[str]]
    queues: set[str]
    is_whole: bool

    @classmethod
    def ask(cls, app: Any, timeout: float, findings: list[Finding]) -> _Workers | None:
        """Ask all workers. None, and a finding, if they cannot be asked."""
        try:
            control = broker.remote_control(app)
            stats = (control and control.inspect(timeout=timeout).stats()) or {}
            # Now the number of workers is known, so these calls end without the timeout.
            inspect = app.control.inspect(timeout=timeout, limit=len(stats))
            tasks = (stats and inspect.registered()) or {}
            queues = (stats and inspect.active_queues()) or {}
        except Exception as error:  # noqa: BLE001 - whatever the broker's client raises
            findings.append(
                Finding(
                    "workers",
                    WARNING,
                    f"the workers cannot be asked: {type(error).__name__}: {error}",
                    "The broker cannot be reached, or does not support remote control.",
                    "Check that broker_url leads to the broker. Nothing, if it is one such as SQS.",
                )
            )
            return None
        if not stats:
            findings.append(
                Finding(
                    "workers",
                    WARNING,
                    f"no worker has answered within {timeout:g} s",
                    "Without a worker no task runs, and no parked task is resumed.",
                    "Start a worker; or give busy workers more time with --timeout. With "
                    "worker_enable_remote_control=False, or on SQS, none can answer.",
                )
            )
        if halves := sorted(stats.keys() - (tasks.keys() & queues.keys())):
            findings.append(
                Finding(
                    "workers",
                    WARNING,
                    f"{', '.join(halves)} answered in part only, within {timeout:g} s",
                    "Not all tasks and queues are known, so they are not checked.",
                    "Give busy workers more time with --timeout.",
                )
            )
        return cls(
            {name: each["relock"] for name, each in stats.items() if "relock" in each},
            tasks,
            {queue["name"] for each in queues.values() for queue in each},
            not halves,
        )

    def judge(self, app: Any, engine: Engine | None) -> Iterator[Finding]:
        for name in sorted(self.tasks.keys() | self.told.keys()):
            registered = {task.partition(" ")[0] for task in self.tasks.get(name, ())}
            if name in self.told:
                yield from _compared(name, self.told[name], registered, app, engine)
            else:
                yield from _of_tasks(name, {}, registered, app)
        others = {str(told.get("version")) for told in self.told.values()} - {__version__}
        if others:
            yield Finding(
                "workers",
                WARNING,
                f"celery-relock is {__version__} here, and {', '.join(sorted(others))} in workers",
                "Versions with the same layout of keys work together; others refuse to start.",
                "Finish the deploy.",
            )


def _compared(
    name: str, told: _Told, registered: set[str], app: Any, engine: Engine | None
) -> Iterator[Finding]:
    if problem := told.get("problem"):
        yield Finding(
            "workers",
            ERROR,
            f"the worker {name} has no locks: {problem}",
            "Its locked tasks fail, and it resumes no parked tasks.",
            "Correct its settings, and restart the worker.",
        )
        return
    here = backend_settings(app).namespace if engine is not None else told.get("namespace")
    if told.get("namespace") != here:
        both = sorted(
            {each.options.task for each in locked_tasks(app)} & set(told.get("tasks") or ())
        )
        yield Finding(
            "workers",
            ERROR if both else NOTICE,
            f"the worker {name} has relock_namespace={told.get('namespace')!r}, and here it is "
            f"{here!r}; it has {', '.join(both) or 'none of the locked tasks here'}",
            "The two do not exclude each other.",
            "Give both the same relock_namespace, and restart them."
            if both
            else "Nothing, if it belongs to another program.",
        )
        return
    place = told.get("backend")
    if place == engines.engine_without_locks().backend.id:
        yield Finding(
            "workers",
            ERROR,
            f"the worker {name} has relock_enabled=False",
            "Its tasks run without their locks, beside those of other workers.",
            "Remove the setting there, and restart the worker.",
        )
    # Either is "" while a client cannot be made.
    elif engine is not None and place and (own := engine.backend.id) and place != own:
        yield Finding(
            "workers",
            WARNING,
            f"the worker {name} has its locks at another address",
            "If this is another Redis, or another database, the two do not exclude each other.",
            "Give both the same relock_url.",
        )
    there, here = told.get("prefix"), _prefix(app)
    if None not in (there, here) and there != here:
        yield Finding(
            "workers",
            WARNING,
            f"the worker {name} has relock_prefix={there}, and here it is {here}",
            "A call whose sender has no prefix gets that of the worker that runs it: then the two "
            "do not exclude each other.",
            "Give both the same relock_prefix, and restart them.",
        )
    yield from _of_tasks(name, told, registered, app)


def _prefix(app: Any) -> str | None:
    try:
        return key_of(name_prefix(app))
    except LockConfigError:
        return None  # told where the tasks are loaded


def _of_tasks(name: str, told: _Told, registered: set[str], app: Any) -> Iterator[Finding]:
    """`registered`: all tasks of the worker. An older version of the library tells no limits."""
    locked, limits = told.get("tasks") or {}, told.get("limits") or {}
    own = {each.options.task: each.options for each in locked_tasks(app)}
    if unlocked := sorted((own.keys() & registered) - locked.keys()):
        yield Finding(
            "workers",
            ERROR,
            f"the worker {name} runs {', '.join(unlocked)} without a lock",
            "It has not loaded celery-relock, or has an older version of your code, in "
            "which these tasks have no lock: they run beside those of other workers.",
            "Deploy the same code everywhere, and restart the worker.",
        )
    for task, key in sorted(locked.items()):
        here, limit = own.get(task), limits.get(task)
        if task not in app.tasks:
            continue
        if here is None or key_of(here.key) != key:
            differs = f"lock_key={key} for {task}, and here "
            differs += f"it is {key_of(here.key)}" if here else "it has no lock"
            risk = "The two do not exclude each other."
        elif limit not in (None, key_of(here.limit)):
            differs = f"lock_limit={limit} for {task}, and here it is {key_of(here.limit)}"
            risk = "The task with the higher limit runs beside one that expects to be alone."
        else:
            continue
        yield Finding(
            "workers",
            ERROR,
            f"the worker {name} has {differs}",
            risk,
            "Deploy the same code everywhere, and restart the worker.",
        )


def _parked(
    app: Any, engine: Engine, workers: _Workers | None, parked: Sequence[ParkedTask]
) -> Iterator[Finding]:
    if app is None:
        return
    own = parking.homes(app)
    unserved, unresumed = _unattended(app, engine, workers, [p for p in parked if p.home in own])
    of_others = {
        each.task
        for each in parked
        if each.home not in own
        and not (each.lock.startswith(DEBOUNCE) and workers and workers.told)  # see `_bursts`
    }
    if unresumed is not None:
        yield Finding(
            "parked",
            ERROR,
            "no worker that answers has celery-relock, and there are parked tasks such as "
            f"{unresumed.task}[{unresumed.task_id}] for the lock {unresumed.lock!r}",
            "A worker without celery-relock resumes none of them.",
            "Start a worker with celery-relock until `celery -A APP relock stats` counts nobody "
            "waiting, or cancel them: celery -A APP relock cancel "
            + shlex.quote(unresumed.task_id),
        )
    for queue, each in sorted(unserved.items()):
        yield Finding(
            "parked",
            ERROR,
            f"no worker that answers consumes the queue {queue!r}, which has parked tasks such as "
            f"{each.task}[{each.task_id}] for the lock {each.lock!r}",
            "When their turn comes, they are published to a queue that nobody reads. Each of them "
            "holds up the tasks behind it for a minute.",
            f"Start a worker with -Q {shlex.quote(queue)}, or cancel them: celery -A APP relock "
            f"cancel {shlex.quote(each.task_id)}",
        )
    if often := [each for each in parked if each.sent >= _OFTEN and each.queue not in unserved]:
        first = max(often, key=lambda each: each.sent)
        yield Finding(
            "parked",
            WARNING,
            "parked tasks that have had their turn again and again and have not come to a worker: "
            f"{len(often)}, such as {first.task}[{first.task_id}] for the lock {first.lock!r}, "
            f"whose message was handed out {first.sent} times",
            "Either the workers cannot publish it (a right that is missing, a message that the "
            "broker finds too large), or their queue has a long backlog.",
            "Look for 'could not be resumed' in the workers' logs. To give it up: "
            f"celery -A APP relock cancel {shlex.quote(first.task_id)}",
        )
    if of_others:
        yield Finding(
            "parked",
            NOTICE,
            f"tasks are parked by another app, or for another broker: "
            f"{', '.join(sorted(of_others))}",
            "This app's workers cannot resume them.",
            "Nothing, if the other app has its own workers. After you changed broker_url or the "
            "app's name, run a worker with the old value until none of these tasks is left.",
        )


def _unattended(
    app: Any, engine: Engine, workers: _Workers | None, parked: Sequence[ParkedTask]
) -> tuple[dict[str, ParkedTask], ParkedTask | None]:
    """One parked task of this app for each queue that no worker consumes; and one of those queues
    that workers without the library alone consume."""
    unserved: dict[str, ParkedTask] = {}
    unresumed: ParkedTask | None = None
    if workers is None or not workers.is_whole or not broker.has_remote_control(app):
        return unserved, unresumed
    # Redis is asked once about each queue, however many are parked. The first is named.
    first = {parking.channel(p.home, p.queue): p for p in reversed(parked) if p.queue}
    for channel, each in first.items():
        is_read = each.queue in workers.queues
        if is_read and workers.told:
            continue
        if engine.backend.consumed(channel):
            continue  # by one that does not answer
        if is_read:
            unresumed = unresumed or each
        else:
            unserved.setdefault(each.queue, each)
    return unserved, unresumed


def _bursts(app: Any, workers: _Workers, parked: Iterable[ParkedTask]) -> Iterator[Finding]:
    """Findings about bursts: their callers park them, and might spell the broker's URL in another
    way than the workers. (Other tasks are parked by a worker, which can publish them.)"""
    own, told = parking.home(app), workers.told.values()
    homes = {home for each in told for home in each.get("homes", ())}
    unsent = {each.task: each for each in parked if each.lock.startswith(DEBOUNCE)}
    unsent = {task: each for task, each in unsent.items() if each.home not in homes}
    alike = (
        "Give every process the same broker_url (or broker_write_url), character by character "
        "except for user and password, and every Celery() the same name."
    )
    here = [] if own in homes else [each.options for each in locked_tasks(app)]
    if debounced := [each.task for each in here if each.debounce]:
        yield Finding(
            "bursts",
            ERROR,
            f"no worker that answers sends the bursts of {', '.join(debounced)} that begin here",
            "The broker's URL or the app's name is spelt differently here and in the workers, so "
            "no worker knows that these bursts are its own. These calls wait, and never run.",
            alike,
        )
    for task, each in sorted(unsent.items()):
        yield Finding(
            "bursts",
            WARNING,
            f"no worker that answers sends the burst {task}[{each.task_id}]",
            "Its callers spell the broker's URL or the app's name differently than these workers. "
            "The calls wait, and never run, unless workers at another broker send them.",
            f"{alike} To send the waiting bursts, run a worker with the callers' spelling.",
        )
