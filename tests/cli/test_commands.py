"""`celery relock …`: what each command prints, as text and as JSON, and its exit code."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import click
import pytest
from celery import Celery
from click.testing import CliRunner, Result

from celery_relock import Lock
from celery_relock.admin import Locks
from celery_relock.cli import commands, relock
from celery_relock.cli.base import table
from celery_relock.engine.protocol import LINE, SHARED, Claim, PlaceRequest, Release
from celery_relock.errors import LockLost
from tests.support import Worker, wait_for
from tests.support.desk import Desk
from tests.support.parked import lock_of
from tests.support.ports import free_port
from tests.support.programs import said_by
from tests.support.worker import ROOT, environment_of

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

Run = Callable[..., Result]


@pytest.fixture
def run(worker: Worker) -> Run:
    """Run a command with the worker's app: `run("ls", "account:*")`."""

    def run(*arguments: str, code: int = 0, app: Any = worker.module.app, **more: Any) -> Result:
        found = CliRunner().invoke(relock, arguments, obj=SimpleNamespace(app=app), **more)
        assert "Traceback" not in found.output
        assert found.exit_code == code, (found.output, found.exception)
        return found

    return run


def document(result: Result) -> Any:
    return json.loads(result.stdout)


LOCK = {"name", "at", "held", "waiting", "parked", "holders", "waiters", "foreign"}
HOLDER = {
    *("token", "owner", "execution_id", "task", "task_id", "host", "pid", "since"),
    *("lease_left", "kept", "cooldown", "pause", "shared"),
}
WAITER = HOLDER - {"token", "lease_left", "kept", "cooldown", "pause"} | {
    "position",
    "state",
    "due",
    "names",
    "sent",
}


def test_no_worker_and_no_client_loads_what_only_people_need(worker: Worker, key: str) -> None:
    """The worker was started by the `celery` command, which loads the plugin point of all. First of
    all tests: a worker that was asked where a task is has loaded what finds it."""
    in_worker = worker.module.loaded.delay(key).get(timeout=30)
    code = (
        "import sys, celery_relock, celery\n"
        "from celery_relock import LockedTask, Lock, locked\n"
        "app = celery.Celery(); app.conf.relock_url = sys.argv[1]\n"
        "@app.task(base=LockedTask, lock_key='a')\n"
        "def task(): return 'done'\n"
        "assert task.apply().get() == 'done'\n"
        "print(*[name for name in sys.modules if name.startswith('celery_relock')])"
    )
    in_client = said_by(code, worker.module.app.conf.relock_url).split()
    people = ("admin", "cli.", "contrib.django", "doctor", "metrics")
    # The main process of a worker, which this one runs its tasks in, looks at its servers once.
    for loaded, not_there in (
        (in_worker, people),
        (in_client, (*people, "inspection", "diagnosis")),
    ):
        assert "celery_relock.task" in loaded
        assert [name for name in loaded if any(each in name for each in not_there)] == []


def test_why_reads_a_result_that_needs_what_the_apps_modules_set_up(
    worker: Worker,
) -> None:
    own = worker.settings
    task_id = "of-a-django-project"
    worker.module.app.backend.mark_as_done(task_id, "done")
    command = ["celery", "-A", "tests.admin.apps.in_django", "relock", "why", task_id]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=environment_of(own),
        capture_output=True,
        text=True,
    )
    assert "has ended: SUCCESS" in done.stdout, done.stderr


def test_ls_and_show_tell_of_a_lock(run: Run, key: str, held: Any, trips: list[str]) -> None:
    parked = held.park()

    head, row = run("ls", key).stdout.splitlines()
    assert head.split() == ["LOCK", "HELD", "BY", "FOR", "WAITING", "PARKED"]
    assert row.split()[:2] == [key, "tests.admin.apps.desk.hold"]
    assert row.split()[-2:] == ["1", "1"]
    trips.clear()
    shown = run("show", key).stdout
    assert 1 <= len(trips) <= 5, "its order is looked at as well"
    assert f"{key}: 1 holding, 1 waiting, 1 of them parked" in shown
    assert f"tests.admin.apps.desk.hold[{held.id}]" in shown
    assert parked in shown.splitlines()[-1]


def test_a_lock_that_cools_down_is_told_apart(run: Run, key: str, worker: Worker) -> None:
    assert worker.module.cools.delay(key).get(timeout=20) == key
    assert f"{worker.module.cools.name} (cools down)  " in run("ls", key).stdout
    assert "the lock cools down until the lease ends (lock_cooldown)" in run("show", key).stdout
    run("release", key, "--yes")


def test_show_tells_who_shares_a_lock_or_is_to(run: Run, key: str, worker: Worker) -> None:
    conf = worker.module.app.conf
    with Lock(conf.relock_url, key, namespace=conf.relock_namespace, mode="shared") as lock:
        backend = lock._engine.backend
        for run_id, limit in (("alone", 1), ("beside", SHARED)):
            backend.acquire(Claim(run_id, "n", run_id, (key,), (limit,), 30.0), 30.0)
        shown = run("show", key).stdout.splitlines()
        for each in ("alone", "beside"):
            backend.release(Release((key,), each, "n"))
    assert any(line.startswith("    shared without a break since ") for line in shown)
    assert [line.split()[1] for line in shown[-2:]] == ["waiting", "waiting,"]
    assert "waiting, shared" in shown[-1]


def test_the_documents_have_these_fields(run: Run, key: str, held: Any) -> None:
    held.park()

    found = document(run("ls", key, "--json"))
    assert set(found) == {"locks", "cut"}
    assert set(found["locks"][0]) == LOCK
    lock = document(run("show", key, "--json"))
    assert set(lock) == LOCK | {"order"}
    assert lock["order"] is None, "nobody was sent with lock_order"
    assert (set(lock["holders"][0]), set(lock["waiters"][0])) == (HOLDER, WAITER)
    why = {"task_id", "state", "sentence", "lock", "ahead", "holders"}
    assert set(document(run("why", lock["waiters"][0]["task_id"], "--json"))) == why
    stats = {
        *(
            "locks",
            "held",
            "contended",
            "holders",
            "waiting",
            "parked",
            "markers",
            "bursts",
            "foreign",
        ),
        *("oldest_wait", "oldest_wait_lock", "oldest_hold", "oldest_hold_lock"),
    }
    assert set(document(run("stats", "--json"))) == stats
    once = document(run("watch", key, "--json", "--count", "1"))
    assert (set(once), set(once["locks"][0])) == ({"locks", "cut"}, LOCK)


def test_what_is_not_there_is_said_and_is_exit_code_1(run: Run, key: str) -> None:
    assert "no lock like" in run("ls", key, code=1).stdout
    assert document(run("ls", key, "--json", code=1)) == {"locks": [], "cut": False}
    markers = run("ls", "--dedup", key, code=1).stdout
    assert markers.startswith(f"no marker like {key!r}: no call is marked in the namespace")
    assert f"nobody holds '{key}'" in run("show", key, code=1).stdout
    assert "nothing is known of the task" in run("why", "no-such-task", code=1).stdout
    assert "nothing to release" in run("release", key, "--yes", code=1).stdout
    assert "not parked" in run("cancel", "no-such-task", code=1).stdout


def test_wrong_use_is_exit_code_2(run: Run, key: str, redis_url: str) -> None:
    assert "No such command" in run("shwo", code=2).output
    assert "Missing argument" in run("show", code=2).output
    assert "--namespace needs --redis" in run("ls", "--namespace", "n", code=2).output
    assert "there is no terminal to ask at" in run("release", key, code=2).output
    for below in (
        ("ls", "--limit", "-1"),
        ("show", key, "--limit", "-1"),
        ("watch", "--count", "-1"),
        ("watch", "--interval", "-1"),
        ("watch", "--interval", "nan"),
        ("doctor", "--timeout", "-1"),
        ("doctor", "--timeout", "nan"),
        ("doctor", "--timeout", "inf"),
        ("exporter", "--port", "65536"),
        ("ls", "--limit", "1000001"),
        ("show", key, "--limit", "99999999999999999"),
    ):
        assert "is not in the range" in run(*below, code=2).output
    for unset in (
        ("ls", "--redis", ""),
        ("ls", "--redis", "", "--namespace", "n"),
        ("show", ""),
        ("release", "", "--yes"),
        ("release", key, "--yes", "--task", ""),
        ("why", ""),
        ("cancel", "some-task", " "),
    ):
        assert "it is empty" in run(*unset, code=2).output
    here = ("--redis", redis_url)
    refused = run("cancel", "some-task", *here, code=2).output
    assert "needs its app" in refused
    assert "without --redis" in refused
    for command in (("ls",), ("release", key, "--yes")):
        assert "use 1 to 60 characters" in run(*command, *here, "--namespace", "", code=2).output
    assert "not the URL of a Redis" in run("ls", "--redis", "nonsense://here", code=2).output
    for addr in ("a..b", "192.0.2.1"):
        listening = run("exporter", "--port", "0", "--addr", addr, code=2).output
        assert f"cannot listen on {addr}:0: " in listening


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Somebody at a terminal says yes, after this has happened."""

    def says_yes_after(happens: Callable[[], object]) -> None:
        terminal = SimpleNamespace(isatty=lambda: True)
        monkeypatch.setattr(commands, "sys", SimpleNamespace(stdin=terminal))
        monkeypatch.setattr(click, "confirm", lambda _: (happens(), True)[1])

    return says_yes_after


def test_who_got_the_lock_while_somebody_was_asked_is_not_released(
    run: Run, redis_url: str, namespace: str, asked: Any
) -> None:
    here = ("--redis", redis_url, "--namespace", namespace)
    shown, other = (Lock(redis_url, "a", namespace=namespace) for _ in range(2))
    assert shown.acquire()
    asked(lambda: (shown.release(), other.acquire()))

    told = run("release", "a", *here, code=1).stdout

    assert told.endswith("nothing to release: nobody of those shown holds 'a'\n")
    assert other.owned()
    asked(lambda: None)
    assert run("release", "a", *here).stdout.endswith("released: a, of Lock\n")
    with pytest.raises(LockLost):
        other.release()


def test_nobody_is_asked_whether_to_release_what_is_not_a_lock(
    run: Run, redis_url: str, namespace: str, client: Any, asked: Any
) -> None:
    client.set(f"{namespace}:{{0}}:l:theirs", 1)
    questions: list[str] = []
    asked(lambda: questions.append("Release it by force?"))

    said = run("release", "theirs", "--redis", redis_url, "--namespace", namespace, code=1).stdout

    assert "theirs is not a lock" in said
    assert questions == []


def test_nobody_is_asked_whether_to_release_what_nobody_holds(
    run: Run, redis_url: str, namespace: str, asked: Any
) -> None:
    desk, questions = Desk(redis_url, namespace), list[str]()
    try:
        desk.fence("r1", names=("b",))
        desk.park("r2", names=("a", "b"))
        asked(lambda: questions.append("Release it by force?"))
        here = ("--redis", redis_url, "--namespace", namespace)
        said = run("release", "a", *here, code=1).stdout
    finally:
        desk.wipe()
        desk.close()

    assert said.startswith("a: 0 holding, 1 waiting, 1 of them parked\n")
    assert said.endswith("nothing to release: nobody holds 'a'\n")
    assert questions == []


@pytest.mark.parametrize("limit", [1, SHARED])
def test_a_permit_that_was_passed_on_while_somebody_was_asked_is_released(
    run: Run, redis_url: str, namespace: str, asked: Any, limit: int
) -> None:
    """By a step of a workflow to the next one. Not who has come to share a lock."""
    desk, how = Desk(redis_url, namespace), {"limit": limit, "owner": "w"}
    try:
        desk.fence("r1", **how)

        def goes_on() -> None:
            desk.fence("r2", ancestors=("r1",), **how)
            desk.release("r1")

        asked(goes_on)
        here = ("--redis", redis_url, "--namespace", namespace)
        run("release", "a", *here, code=int(limit == SHARED))
        assert desk.holders() == ["r2"] * (limit == SHARED)
    finally:
        desk.release("r2")
        desk.close()


@pytest.mark.parametrize("waited_for", [True, False])
def test_after_a_yes_an_order_goes_on_without_the_call_that_was_shown_if_somebody_waits_for_it(
    run: Run, redis_url: str, namespace: str, asked: Any, waited_for: bool
) -> None:
    desk, line = Desk(redis_url, namespace), f"{LINE}a"
    try:
        for call in ("r1", "r2"):
            desk.backend.place(PlaceRequest(line, call, f"t-{call}", "call", 60.0, 0.0, 0.0, 600.0))
        if waited_for:
            desk.park("r2", names=(line,), owner="t-r2")
        asked(lambda: None)
        here = ("--redis", redis_url, "--namespace", namespace)
        run("release", "a", *here, code=int(not waited_for))
        assert desk.waiters(line) == (["r2"] if waited_for else ["r1", "r2"])
    finally:
        desk.wipe()
        desk.close()


def test_no_option_is_read_from_the_environment(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets such variables beside a Service that is called `celery-relock-exporter`."""
    monkeypatch.setenv("CELERY_RELOCK_EXPORTER_PORT", "tcp://10.0.0.1:9540")
    monkeypatch.setenv("CELERY_RELOCK_RELEASE_YES", "1")
    celery = {"obj": SimpleNamespace(app=None), "auto_envvar_prefix": "CELERY_RELOCK"}
    given = ("release", "a", "--redis", redis_url, "--namespace", namespace)

    command = relock.get_command(click.Context(relock), "exporter")
    of_exporter = command.make_context("exporter", [], auto_envvar_prefix="CELERY_RELOCK_EXPORTER")
    assert of_exporter.params["port"] == 9540
    assert "give --yes" in CliRunner().invoke(relock, given, **celery).output


def test_an_argument_that_is_not_utf_8_is_exit_code_2(run: Run, redis_url: str) -> None:
    name, here = os.fsdecode(b"\xff bin"), ("--redis", redis_url)
    for command in (
        ("ls", name),
        ("show", name),
        ("why", name),
        ("watch", name, "--count", "1"),
        ("cancel", "some-task", name),
        ("release", name, "--yes"),
        ("release", "a", "--yes", "--task", name),
        ("ls", "--namespace", name),
    ):
        assert r"'\udcff bin' is not UTF-8" in run(*command, *here, code=2).output


def test_what_stdout_cannot_encode_is_escaped(redis_url: str, namespace: str) -> None:
    names = ["\u65e5\u672c", "\U0001f600"]
    here = ("--redis", redis_url, "--namespace", namespace)
    runner = CliRunner(charset="latin-1")

    with (
        Lock(redis_url, names[0], namespace=namespace),
        Lock(redis_url, names[1], namespace=namespace),
    ):
        told = runner.invoke(relock, ("ls", "--json", *here)).stdout
        assert {each["name"] for each in json.loads(told)["locks"]} == {*names}
        looks = runner.invoke(relock, ("watch", "--count", "1", "--json", *here)).stdout
        assert {each["name"] for each in json.loads(looks)["locks"]} == {*names}
        for command in (("ls",), ("show", names[0]), ("watch", "--count", "1")):
            assert r"\u65e5\u672c" in runner.invoke(relock, (*command, *here)).stdout


def test_a_redis_that_is_away_is_exit_code_69(run: Run) -> None:
    away = f"redis://127.0.0.1:{free_port()}"
    for command in (("ls",), ("show", "a"), ("stats",), ("release", "a", "--yes"), ("watch",)):
        found = run(*command, "--redis", away, code=69)
        assert "cannot be reached" in found.stderr
        assert found.stdout == ""


def test_release_frees_a_lock_and_cancel_withdraws_an_execution(
    worker: Worker, run: Run, key: str, held: Any
) -> None:
    first, second = held.park(), held.park()

    assert run("cancel", second).stdout == f"cancelled: {second}\n"
    missed = run("cancel", held.id, code=1).stdout
    assert "not parked" in missed
    assert "celery -A APP control terminate SIGTERM" in missed
    released = document(run("release", key, "--task", held.id, "--yes", "--json"))
    assert [each["task_id"] for each in released["released"]] == [held.id]
    worker.journal.wait_for(f"took {key}")
    wait_for(lambda: worker.module.app.AsyncResult(first).state == "SUCCESS", what="the next one")
    assert "has ended: SUCCESS" in run("why", first).stdout


@pytest.mark.parametrize("said", ["no luck", "no luck."])
def test_an_answer_ends_with_one_full_stop(run: Run, worker: Worker, said: str) -> None:
    task_id = str(uuid.uuid4())
    worker.module.app.backend.store_result(task_id, ValueError(said), "FAILURE")
    assert run("why", task_id).stdout.endswith("has ended: FAILURE, ValueError: no luck.\n")
    assert run("cancel", task_id, code=1).stdout.endswith("FAILURE, ValueError: no luck.\n")


def test_a_task_can_be_named_as_lines_of_the_log_name_it(
    worker: Worker, run: Run, key: str, held: Any
) -> None:
    parked, module = held.park(), "tests.admin.apps.desk"

    assert f"[{parked}] is parked" in run("why", f" {module}.take[{parked}]").stdout
    assert run("cancel", f"{module}.take[{parked}]").stdout == f"cancelled: {parked}\n"
    released = document(
        run("release", key, "--task", f"{module}.hold[{held.id}]", "--yes", "--json")
    )
    assert [each["task_id"] for each in released["released"]] == [held.id]


@pytest.mark.parametrize("name", ["of.another.app", "of two words", "too.long…to.be.shown"])
def test_so_can_one_whose_name_the_app_does_not_know(
    run: Run, key: str, held: Any, name: str
) -> None:
    parked = held.park()

    assert f"[{parked}] is parked" in run("why", f"{name}[{parked}]").stdout
    assert run("cancel", f"{name}[{parked}]").stdout == f"cancelled: {parked}\n"
    released = document(run("release", key, "--task", f"{name}[{held.id}]", "--yes", "--json"))
    assert [each["task_id"] for each in released["released"]] == [held.id]


def test_an_id_that_looks_like_that_is_meant_as_it_is(run: Run, worker: Worker, key: str) -> None:
    odd = f"job[{key}]"
    sent = worker.module.hold.apply_async((key,), task_id=odd)
    worker.journal.wait_for(f"inside {key}")
    assert f"[{odd}] has held the lock" in run("why", odd).stdout
    worker.journal.add(f"go {key}")
    sent.get(timeout=20)


def test_a_task_whose_module_the_command_has_not_imported_yet_can_be_named_so(
    run: Run, worker: Worker
) -> None:
    app = _other_app(worker, include=["tests.admin.apps.late"])
    assert "of the task 0c95e17d:" in run("why", "late.work[0c95e17d]", code=1, app=app).stdout


def test_an_app_of_which_a_module_cannot_be_imported_is_asked_all_the_same(
    run: Run, worker: Worker, held: Any, caplog: Any
) -> None:
    app = _other_app(worker, include=["tests.admin.apps.no_such_module"])
    assert f"[{held.id}] has held the lock" in run("why", held.id, app=app).stdout
    assert "Cannot import all task modules" in caplog.text
    worker.module.app.backend.mark_as_done("a-task-that-ended", "done")
    assert "has ended: SUCCESS" in run("why", "a-task-that-ended", app=app).stdout


def _other_app(worker: Worker, **more: Any) -> Celery:
    """Another app on the broker and the locks of the worker, without its tasks."""
    app, conf = Celery("other", **more), worker.module.app.conf
    for name in (
        *("broker_url", "result_backend", "broker_transport_options", "relock_url"),
        *("result_backend_transport_options", "relock_namespace"),
    ):
        app.conf[name] = conf[name]
    return app


def test_a_cancelled_call_leaves_nothing_behind_in_a_process_that_runs_no_tasks(
    worker: Worker, run: Run, key: str, held: Any
) -> None:
    """As the command is: nothing of a worker is loaded there before."""
    parked = held.park(worker.module.once)
    command = [sys.executable, "-m", "celery", "-A", "tests.admin.apps.desk"]

    done = subprocess.run(
        [*command, "relock", "cancel", parked],
        cwd=ROOT,
        env=environment_of(worker.settings),
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"cancelled: {parked}\n"
    assert document(run("ls", "--dedup", f"*{key}", "--json", code=1))["locks"] == []
    assert held.park(worker.module.once) != parked


def test_one_that_cannot_be_cancelled_keeps_no_other_from_it(
    worker: Worker, run: Run, key: str, held: Any
) -> None:
    parked = [held.park(), held.park(worker.module.once), held.park()]
    app, unknown = worker.module.app, worker.module.once.name
    known = app.tasks.pop(unknown)
    try:
        found = document(run("cancel", *parked, "--json", code=1))
        told = run("cancel", parked[1], code=1).stdout
    finally:
        app.tasks[unknown] = known

    assert found["cancelled"] == [parked[0], parked[2]]
    assert unknown in found["failed"][parked[1]]
    assert told.startswith(f"failed: {parked[1]}: ")
    run("cancel", parked[1])


def test_who_was_cancelled_before_redis_went_away_is_told(
    run: Run, own_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_redis()
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.relock_url, why = f"{server.url}?socket_timeout=0.5", Locks.why

    def then_it_goes(locks: Locks, task_id: str) -> Any:
        found = why(locks, task_id)
        server.stop()
        return found

    monkeypatch.setattr(Locks, "why", then_it_goes)
    found = run("cancel", "first", "second", "third", "--json", app=app, code=69)
    app.close()

    assert "cannot be reached" in found.stderr
    told = document(found)
    assert [each["task_id"] for each in told["not_parked"]] == ["first"]
    assert list(told["failed"]) == ["second", "third"]


@pytest.mark.parametrize(
    "name", ["a\u200cb", "a\xa0b", "\U0001f468\u200d\U0001f469", r"C:\temp", "C:\\temp\u200c"]
)
def test_what_ls_shows_is_understood(run: Run, redis_url: str, namespace: str, name: str) -> None:
    here = ("--redis", redis_url, "--namespace", namespace)
    lock = Lock(redis_url, name, namespace=namespace)
    lock.acquire()
    shown = run("ls", *here).stdout.splitlines()[1].split("  ")[0]
    assert shown.isprintable()

    assert f"{shown}: 1 holding" in run("show", shown, *here).stdout
    assert run("release", shown, "--yes", *here).stdout == f"released: {shown}, of Lock\n"


def test_a_dedup_marker_is_released_by_the_name_that_ls_shows(
    worker: Worker, run: Run, key: str, held: Any
) -> None:
    parked = held.park(worker.module.once)
    name = run("ls", "--dedup", f"*{key}").stdout.splitlines()[1].split()[0]
    assert name == f"dedup\\ttests.admin.apps.desk.once\\t{key}"

    assert "marks a call that is queued (lock_dedup)" in run("show", name).stdout
    assert f"{name}  {worker.module.once.name} (queued)" in run("ls", "--dedup", name).stdout
    [marker] = document(run("ls", "--dedup", f"*{key}", "--json"))["locks"]
    held_by = marker["holders"][0]
    assert (held_by["task"], held_by["task_id"]) == (worker.module.once.name, parked)
    run("release", name, "--yes")

    run("ls", "--dedup", f"*{key}", code=1)


def test_of_a_call_that_has_its_turn_the_time_of_its_place_is_told_and_no_time_of_a_hold(
    worker: Worker, run: Run, key: str
) -> None:
    """It can have been at the broker until a moment ago."""
    first = worker.module.in_order.delay(key, "first")
    worker.journal.wait_for(f"first {key}")
    second = worker.module.in_order.delay(key, "second")
    wait_for(lambda: second.state == "BLOCKED", what="the second")
    wait_for(lambda: "parked" in run("why", second.id).stdout, what="its message in Redis")

    blocked, shown, why = second.info, run("show", key).stdout, run("why", second.id).stdout
    lock, line = run("ls", f"*{key}").stdout.splitlines()[1:]
    worker.journal.add(f"go {key}")
    second.get(timeout=20)

    assert blocked["since"] is None
    assert re.fullmatch(rf"{key} +\S+in_order +[\d.]+ s +0 +0", lock)
    assert re.fullmatch(rf"order of {key}  \S+in_order +1 +1", line)
    held, turn = re.findall(r"^    (.*), lease ", shown, re.MULTILINE)
    assert held.startswith("since ")
    assert re.fullmatch(r"its place is of [-\d]+ [:\d]+ \([\d.]+ s ago\)", turn)
    assert f"; {worker.module.in_order.name}[{first.id}] has its turn in it, in process " in why


def test_the_order_of_a_lock_is_told_as_that(worker: Worker, run: Run, key: str) -> None:
    first = worker.module.in_order.apply_async((key, "late"), queue="nowhere")
    second = worker.module.in_order.delay(key, "second")
    wait_for(lambda: "parked" in run("why", second.id).stdout, 20, "the second")

    assert run("ls", f"*{key}").stdout.splitlines()[1].startswith(f"order of {key}  -")
    rows = run("show", key).stdout.splitlines()
    assert rows[1:3] == ["", f"order of {key}: 0 holding, 2 waiting, 1 of them parked"]
    assert [row.split()[1] for row in rows[-2:]] == ["awaited", "parked"]
    line = document(run("show", key, "--json"))["order"]
    assert [each["task_id"] for each in line["waiters"]] == [first.id, second.id]
    ahead = f"in the order of '{key}', with 1 ahead of it; the message of "
    assert f"{ahead}{worker.module.in_order.name}[{first.id}], which is first, is awaited" in (
        run("why", second.id).stdout
    )
    conf = worker.module.app.conf
    without_app = ("--redis", conf.relock_url, "--namespace", conf.relock_namespace)
    told = document(run("why", first.id, "--json", *without_app, app=None))
    assert told["state"] == "awaited"
    assert "first in its queue: its message has not come to a worker" in told["sentence"]

    named = f"order of {key}"  # as `ls` prints it
    assert run("show", named).stdout.startswith(f"{named}: 0 holding, 2 waiting")
    assert run("ls", named).stdout == run("ls", f"order of {key[:-1]}?").stdout
    assert run("watch", "--count", "1", named).stdout.splitlines()[-2].startswith(named)
    with lock_of(worker, named) as lock:  # a lock of that name comes first
        assert [each["name"] for each in document(run("ls", named, "--json"))["locks"]] == [
            f"order\t{key}",
            named,
        ]
        assert document(run("show", named, "--json"))["holders"][0]["token"] == lock.fence
    assert f"[{first.id}]" in run("release", named, "--yes").stdout
    worker.journal.wait_for(f"second {key}", 20)


def test_a_lock_is_found_without_an_app(run: Run, redis_url: str, namespace: str) -> None:
    here = ("--redis", redis_url, "--namespace", namespace)
    with Lock(redis_url, "a", namespace=namespace):
        assert run("ls", *here, app=None).stdout.splitlines()[1].startswith("a     Lock")
        assert "nobody" not in run("show", "a", *here, app=None).stdout
        watched = run("watch", *here, "--count", "2", "--interval", "0", app=None).stdout
        assert watched.count("locks: 1 held; executions: 0 waiting, 0 of them parked") == 2
    assert f"in the namespace '{namespace}'" in run("ls", *here, app=None, code=1).stdout


def test_a_redis_beside_an_app_is_looked_at_in_the_namespace_of_the_app(
    run: Run, key: str, held: Any, redis_url: str
) -> None:
    assert document(run("show", key, "--redis", redis_url, "--json"))["held"] == 1


def test_of_a_waiter_that_died_no_wait_is_told(run: Run, redis_url: str, namespace: str) -> None:
    with Lock(redis_url, "a", namespace=namespace) as lock:
        lock._engine.backend.acquire(Claim("dead", "n", "dead", ("a",), (1,), 30.0), 0.001)
        time.sleep(0.01)
        shown = run("stats", "--redis", redis_url, "--namespace", namespace, app=None).stdout
    assert "waiting   1: 0 of them parked" in shown
    assert "longest" not in shown


def test_ls_lists_no_more_than_it_is_told(run: Run, redis_url: str, namespace: str) -> None:
    here = ("--redis", redis_url, "--namespace", namespace, "--limit", "1")
    with Lock(redis_url, "a", namespace=namespace), Lock(redis_url, "b", namespace=namespace):
        found = run("ls", *here)
        assert len(found.stdout.splitlines()) == 2
        assert "more than 1: --limit 0 lists all" in found.stderr
        assert document(run("ls", *here, "--json"))["cut"] is True


def test_show_has_all_holders_with_a_limit_of_0(run: Run, redis_url: str, namespace: str) -> None:
    here = ("--redis", redis_url, "--namespace", namespace)
    with Lock(redis_url, "a", namespace=namespace):
        assert len(document(run("show", "a", *here, "--limit", "0", "--json"))["holders"]) == 1


def test_a_name_is_found_as_errors_quote_it(run: Run, redis_url: str, namespace: str) -> None:
    here, name = ("--redis", redis_url, "--namespace", namespace), "C:\\temp\\new"
    quoted = repr(name)[1:-1]
    with Lock(redis_url, name, namespace=namespace), Lock(redis_url, "C:new", namespace=namespace):
        assert document(run("show", quoted, *here, "--json"))["name"] == name
        assert document(run("show", name, *here, "--json"))["name"] == name
        [lock] = document(run("ls", r"C:*\\new", *here, "--json"))["locks"]
        assert lock["name"] == name, "in a pattern a backslash is written twice"


def test_a_name_with_both_quotes_is_found_as_errors_quote_it(
    run: Run, redis_url: str, namespace: str
) -> None:
    here, name = ("--redis", redis_url, "--namespace", namespace), 'it\'s "new"'
    with Lock(redis_url, name, namespace=namespace):
        assert document(run("show", repr(name)[1:-1], *here, "--json"))["name"] == name


def test_a_name_that_is_shortened_in_redis_is_found_by_the_whole_name(
    run: Run, worker: Worker, key: str
) -> None:
    name = f"{key} of {'x' * 200}"
    with lock_of(worker, name):
        for each in ("ls", "show"):
            assert "Lock" in run(each, name).stdout
        assert len(document(run("ls", f"{key} of *", "--json"))["locks"]) == 1


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [(">&- <&-", 0, ""), ("> /dev/full", 74, "Error: [Errno 28] No space left on device\n")],
)
def test_a_stdout_that_takes_nothing_is_not_taken_for_a_lock_that_is_not_found(
    redis_url: str, namespace: str, redirection: str, code: int, says: str
) -> None:
    with Lock(redis_url, "a", namespace=namespace):
        for arguments in ("ls", "ls --json"):
            command = f"{sys.executable} -m celery relock {arguments} --redis {redis_url}"
            done = subprocess.run(
                f"{command} --namespace {namespace} {redirection}",
                shell=True,
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            assert (done.returncode, done.stderr) == (code, says)


def test_ls_lists_a_lock_once_that_a_pattern_fits_in_two_ways(
    run: Run, worker: Worker, key: str
) -> None:
    call = worker.module.once.apply_async((key,), countdown=60)
    found = document(run("ls", "--dedup", f"*\\t{key}*", "--json"))["locks"]
    call.revoke()
    assert len({each["name"] for each in found}) == len(found)


def test_watch_counts_as_stats_does(run: Run, worker: Worker, key: str) -> None:
    """Not the calls of an order that are at the broker, nor bursts of calls."""
    first = worker.module.in_order.delay(key, "first")
    worker.journal.wait_for(f"first {key}")
    second = worker.module.in_order.apply_async((key, "second"), countdown=600)
    worker.module.later.delay(key)
    try:
        assert (
            "locks: 1 held; executions: 0 waiting" in run("watch", f"*{key}", "--count", "1").stdout
        )
    finally:
        worker.journal.add(f"go {key}")
        first.get(timeout=20)
        second.revoke()


def test_watch_says_in_its_document_that_there_are_more(
    run: Run, redis_url: str, namespace: str
) -> None:
    watch = ("watch", "--redis", redis_url, "--namespace", namespace, "--count", "1", "--json")
    with ExitStack() as held:
        for number in range(41):
            held.enter_context(Lock(redis_url, f"n{number}", namespace=namespace))
        found = document(run(*watch))
        assert (len(found["locks"]), found["cut"]) == (40, True)


@pytest.mark.timeout(60)
def test_watch_says_on_a_small_terminal_how_many_more_there_are(
    redis_url: str, namespace: str
) -> None:
    command = [sys.executable, "-m", "celery", "relock", "watch", "--count", "1"]
    command += ["--redis", redis_url, "--namespace", namespace]
    environment = {**os.environ, "COLUMNS": "80", "LINES": "12", "TERM": "xterm"}
    master, slave = pty.openpty()
    with ExitStack() as held:
        for number in range(20):
            held.enter_context(Lock(redis_url, f"n{number:02}", namespace=namespace))
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=slave, stderr=slave, close_fds=True
        )
        os.close(slave)
        text = b""
        with suppress(OSError):  # it has ended
            while said := os.read(master, 65536):
                text += said
        os.close(master)
        assert process.wait(20) == 0
    assert "n06" in text.decode()
    assert "… and 13 more" in text.decode()


def test_what_a_terminal_would_obey_is_written_out(
    run: Run, redis_url: str, namespace: str, client: Any
) -> None:
    with Lock(redis_url, "a", namespace=namespace):
        client.set(f"{namespace}:{{0}}:l:\x1b[2J\xff", 1)
        client.set(f"{namespace}:{{0}}:l:".encode() + b"\xff\n", 1)
        here = ("--redis", redis_url, "--namespace", namespace)

        printed = run("ls", *here).stdout

        assert "\x1b" not in printed
        assert "\\x1b[2J" in printed
        assert "\\xff\\n" in printed
        assert document(run("ls", *here, "--json"))["locks"][1]["foreign"] is True


@pytest.mark.timeout(60)
def test_celery_has_the_command_and_a_terminal_of_80_columns_shows_the_table(
    redis_url: str, namespace: str
) -> None:
    """By Celery's own plugin point, in a process and a terminal of its own."""
    command = [sys.executable, "-m", "celery", "relock", "ls"]
    command += ["--redis", redis_url, "--namespace", namespace]
    names = ["short", "a-long-name:" + "x" * 80]
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80"}
    held = [Lock(redis_url, name, namespace=namespace) for name in names]
    for lock in held:
        assert lock.acquire()
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=slave, stderr=slave, close_fds=True
        )
        os.close(slave)
        text = b""
        while b"short" not in text:
            text += os.read(master, 65536)
        assert process.wait(20) == 0
        piped = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        os.close(master)
        for lock in held:
            lock.release()
    lines = text.decode().splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert "…" in lines[1]
    assert names[1] in piped.stdout, "in a pipe nothing is cut"


def test_without_an_app_and_without_a_redis_it_says_what_to_give() -> None:
    for name in ("ls", "doctor"):
        command = [sys.executable, "-m", "celery", "relock", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "celery -A APP relock …, or --redis URL" in done.stderr


def test_a_table_is_aligned() -> None:
    assert table(("A", "B"), [("long", 1), ("b", 22)]) == ["A     B", "long  1", "b     22"]


def test_wide_characters_are_aligned_too() -> None:
    assert table(("A", "B"), [("\u65e5\u672c", 1), ("e\u0301", 22)]) == [
        "A     B",
        "\u65e5\u672c  1",
        "e\u0301     22",
    ]
