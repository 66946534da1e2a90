"""The doctor says what is wrong with settings, servers, workers and parked tasks; each is set up
wrongly here."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.control import Inspect
from click.testing import CliRunner
from redis import Redis

from celery_relock import Lock, LockedTask, doctor
from celery_relock.admin import Locks
from celery_relock.cli import relock
from celery_relock.cli.doctor import _described
from celery_relock.declaration import engine_of
from celery_relock.engine import diagnosis
from celery_relock.engine.inspection import Server
from celery_relock.engine.protocol import Claim, ParkRequest, Release
from celery_relock.worker.parking import channel, home
from celery_relock.worker.report import key_of
from tests.support import RedisServer, new_namespace, wait_for
from tests.support.clock import server_with_a_clock
from tests.support.cluster import ClusterServers
from tests.support.programs import said_by
from tests.support.proxy import Proxy
from tests.support.worker import ROOT, _import_afresh

APP = "tests.doctor.apps.shop"


def found(report, check):
    return [each for each in getattr(report, "findings", report) if each.check == check]


def only(report, check):
    [finding] = found(report, check)
    assert finding.why
    assert finding.do
    return finding


# -- Servers that are set up wrongly -------------------------------------------------------------


@pytest.fixture(scope="module")
def server(redis_binary):
    started = RedisServer(binary=redis_binary)
    started.client().config_set("save", "900 1")
    yield started
    started.stop()


@pytest.fixture
def configured(server):
    """Set some of the server's settings, for this test."""
    before = {}

    def set_(name, value):
        before.setdefault(name, server.client().config_get(name)[name])
        server.client().config_set(name, value)

    yield set_
    for name, value in before.items():
        server.client().config_set(name, value)


def looked_at(server):
    return doctor.examine(place=server.url, namespace=new_namespace())


def test_of_a_server_that_is_as_it_should_be_there_is_nothing_to_say(server):
    with Lock(server.url, "a", namespace="used"):
        report = doctor.examine(place=server.url, namespace="used")
    assert report.findings == ()
    assert report.worst == ""
    [facts] = report.facts["servers"]
    assert facts["role"] == "master"
    assert 0 < facts["round_trip"] < 1
    kinds = {each["kind"]: each["keys"] for each in report.facts["memory"]["kinds"]}
    assert kinds == {"meta": 1, "locks": 1}
    assert json.loads(json.dumps(report.as_dict()))["findings"] == []


def test_a_server_that_throws_keys_away(server, configured):
    configured("maxmemory-policy", "allkeys-lru")
    assert only(looked_at(server), "eviction").severity == "warning"
    configured("maxmemory", "1gb")
    finding = only(looked_at(server), "eviction")
    assert finding.severity == "error"
    assert "allkeys-lru" in finding.what
    assert "parked tasks" in finding.why


def test_a_policy_for_keys_with_a_time_to_live_spares_parked_tasks(server, configured):
    configured("maxmemory-policy", "volatile-lru")
    finding = only(looked_at(server), "eviction")
    assert finding.why == "When its memory is full, Redis deletes locks that are held."


def test_a_server_whose_memory_is_nearly_full(server, configured):
    # Of a server that has next to nothing, the doctor's own connections are more than a twentieth.
    # No long command: Redis keeps the buffer that it read it into, and frees that a second later.
    server.client().setrange("ballast", 20_000_000, "x")
    server.client().pexpire("ballast", 60_000)
    configured("maxmemory", str(int(server.client().info("memory")["used_memory"] * 1.05)))
    nearly = only(looked_at(server), "memory")
    assert (nearly.severity, "maxmemory" in nearly.what) == ("warning", True)
    configured("maxmemory", "1")
    assert only(looked_at(server), "memory").severity == "error", "no lock can be acquired"


def test_a_server_that_keeps_nothing_on_disk(server, configured):
    configured("save", "")
    assert only(looked_at(server), "persistence").severity == "warning"
    configured("appendonly", "yes")
    assert found(looked_at(server), "persistence") == []


def test_a_server_that_cannot_save(server):
    client = server.client()
    path = server._folder / client.config_get("dbfilename")["dbfilename"]
    path.unlink(missing_ok=True)
    path.mkdir()

    def saved():
        with contextlib.suppress(Exception):  # it saves already
            client.bgsave()
        return client.info("persistence")["rdb_last_bgsave_status"]

    wait_for(lambda: saved() == "err")
    assert only(looked_at(server), "persistence").severity == "error"
    path.rmdir()
    wait_for(lambda: saved() == "ok")


def test_a_replica(server):
    server.client().execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        assert only(looked_at(server), "role").severity == "error"
    finally:
        server.client().execute_command("REPLICAOF", "NO", "ONE")


def test_a_server_that_has_hardly_a_connection_left(server, configured):
    with contextlib.ExitStack() as idle:
        for _ in range(60):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        used = int(server.client().info("clients")["connected_clients"])
        configured("maxclients", str(used + 5))
        assert "maxclients" in only(looked_at(server), "connections").what


def test_a_server_with_another_clock():
    server = server_with_a_clock()
    try:
        server.set_clock(-7)
        assert "7.0 s behind" in only(looked_at(server), "clock").what
        server.set_clock(7)
        assert "7.0 s ahead" in only(looked_at(server), "clock").what
    finally:
        server.stop()


def test_a_server_that_is_far_away(server):
    with Proxy(server.port) as proxy:
        proxy.delay = 0.03
        assert "round trip" in only(looked_at(proxy), "latency").what


def test_a_server_that_is_too_old():
    old = Server({"redis_version": "6.0.16"}, "900 1", (0.0, 0.0), (0.001,))
    assert "6.0.16" in only(diagnosis.of_servers([old]), "version").what
    new = old._replace(info={"redis_version": "6.2.0"})
    assert list(diagnosis.of_servers([new])) == []
    odd = old._replace(info={"redis_version": "8.0-m01"})
    assert list(diagnosis.of_servers([odd])) == []


def test_locks_that_no_two_processes_share():
    finding = only(doctor.examine(place="memory://"), "redis")
    assert finding.severity == "error"


def test_clocks_of_a_cluster_that_differ():
    servers = [Server({}, None, (ahead, 0.1), (0.001,)) for ahead in (-0.7, 0.7)]
    assert "1.4 s apart" in only(diagnosis.of_servers(servers), "clock").what


def test_of_a_cluster_it_is_said_which_master_is_set_up_wrongly(redis_binary):
    cluster = ClusterServers(redis_binary, replicas=False)
    try:
        wrong = cluster.nodes[1]
        cluster.admin(wrong).config_set("maxmemory-policy", "allkeys-lru")
        report = doctor.examine(place=cluster.url, namespace=new_namespace())
        at = {f"127.0.0.1:{each.port}" for each in cluster.masters()}
    finally:
        cluster.stop()

    assert only(report, "eviction").what.endswith(f" (127.0.0.1:{wrong.port})")
    assert {each["address"] for each in report.facts["servers"]} == at
    lines = [line for line in _described(report) if line.startswith("server ")]
    assert {line.split()[1].removesuffix(":") for line in lines} == at


def test_no_server_at_all_a_wrong_password_and_another_layout(server):
    away = doctor.examine(place="redis://127.0.0.1:1/0")
    assert "cannot be reached" in only(away, "redis").what
    refused = doctor.examine(place=server.url.replace("redis://", "redis://:wrong@"))
    assert "login" in only(refused, "redis").what
    server.client().hset("older:{0}:meta", mapping={"schema": "1", "buckets": "1"})
    other = doctor.examine(place=server.url, namespace="older")
    assert "another layout" in only(other, "redis").what
    server.client().delete("older:{0}:meta")


def _no_client():
    raise ConnectionError("the vault is not up yet")


def test_a_client_that_cannot_be_made_yet_is_told_as_a_server_that_does_not_answer(app_with):
    app = app_with(relock_url=_no_client)
    for report in (doctor.quick(app), doctor.examine(app, workers=False)):
        finding = only(report, "redis")
        assert finding.severity == "error"
        assert "_no_client() failed to make a Redis client" in finding.what
    assert "the vault is not up yet" in only(doctor.examine(place=_no_client), "redis").what
    words = ["doctor", "--json", "--no-workers"]
    done = CliRunner().invoke(relock, words, obj=SimpleNamespace(app=app))
    assert done.exit_code == 1
    assert [each["check"] for each in json.loads(done.stdout)["findings"]] == ["redis"]


def test_a_namespace_that_nobody_uses_is_told_with_those_that_are_used(server):
    with Lock(server.url, "a", namespace="shop"):
        finding = only(doctor.examine(place=server.url, namespace="sohp"), "namespace")
        with Lock(server.url, "a"):
            beside = only(doctor.examine(place=server.url, namespace="shop"), "namespace")
    assert finding.severity == "warning"
    assert "shop" in finding.what
    assert not server.client().keys("sohp*")
    assert beside.severity == "notice"
    assert beside.what.startswith("in this database there are other namespaces, too: relock")
    server.client().delete("relock:{0}:meta")


def test_what_a_user_may_not_do_by_how_much_it_hurts():
    told = {
        finding.what.split()[4].strip(","): finding.severity
        for finding in doctor._permissions(["+hget", "&relock:*", "+publish", "+scan", "~relock:*"])
    }
    assert told == {
        "+hget": "error",
        "~relock:*": "error",
        "+scan": "notice",
        "&relock:*": "warning",
        "+publish": "warning",
    }


def test_who_cannot_look_for_revoked_stamps_is_told(server):
    server.client().execute_command(
        *("ACL", "SETUSER", "unstamped", "on", ">x", "~*", "&*", "+@all", "-hscan")
    )
    finding = only(
        doctor.examine(place=server.url.replace("://", "://unstamped:x@")), "permissions"
    )
    assert (finding.severity, finding.what.split()[4]) == ("notice", "+hscan,")
    assert "stamp" in finding.why


def test_of_a_permission_that_no_lock_needs_it_is_said_what_fails_without_it():
    said = {
        finding.what.split()[4].strip(","): finding.why
        for finding in doctor._permissions(["+info", "+config|get", "+scan", "+dbsize"])
    }
    assert "what looks at all locks fails: `relock ls`, " in said["+scan"]
    assert not [what for what, why in said.items() if "`relock ls`" in why and what != "+scan"]
    assert [what for what, why in said.items() if "worker" in why] == ["+info", "+config|get"]


def test_a_server_that_hides_commands_is_no_server_on_which_locks_do_not_work(redis_binary):
    hides = [word for name in ("CONFIG", "SCAN") for word in ("--rename-command", name, "")]
    server = RedisServer(*hides, binary=redis_binary)
    try:
        with Lock(server.url, "a", namespace="shop"):
            report = doctor.examine(place=server.url, namespace="shop")
    finally:
        server.stop()
    said = [(each.severity, each.what.split()[4]) for each in found(report, "permissions")]
    assert said == [("notice", "+config|get,"), ("notice", "+scan,")]
    assert not [each for each in report.findings if each.severity == "error"]


def test_a_namespace_whose_server_was_emptied_is_in_use_all_the_same(server):
    with Lock(server.url, "a", namespace="shop"):
        pass
    server.client().flushall()
    with Lock(server.url, "a", namespace="shop"):
        report = doctor.examine(place=server.url, namespace="shop")
    assert not found(report, "namespace")


def test_locks_that_take_much_memory():
    from celery_relock.engine.inspection import Kind, Memory

    sample = Memory(2_000_000, 20_000, (Kind("ended executions", 15_000, 200.0),), ())
    facts: dict[str, Any] = {}
    assert "ended executions" in only(doctor._memory(sample, facts), "memory").what
    assert facts["memory"]["kinds"] == [
        {"kind": "ended executions", "keys": 1_500_000, "bytes": 300_000_000}
    ]


# -- Settings and tasks --------------------------------------------------------------------------


@pytest.fixture
def app_with(server):
    """An app with these settings. Closed: Celery hands shared tasks to every app that there is."""
    made = []

    def make(**settings):
        made.append(Celery("shop", broker=server.url, set_as_current=False))
        made[-1].conf.update({"relock_url": server.url, "relock_namespace": "used", **settings})
        return made[-1]

    yield make
    for app in made:
        app.close()


def test_settings_that_are_misspelt(app_with):
    wrong = only(doctor.quick(app_with(relock_tttl=3)), "settings")
    assert wrong.severity == "error"
    assert "Did you mean relock_ttl?" in wrong.what
    app = app_with(relok_min_replicas=1)
    app.add_defaults({"relok_min_replicas": 2})
    near = only(doctor.quick(app), "settings")
    assert near.severity == "warning"
    assert near.do == "Write relock_min_replicas."
    assert doctor.quick(app_with(relock_ttl=3)) == ()


@pytest.mark.parametrize(
    ("remember", "after", "broker", "found"),
    [
        (None, 43_200, "redis://h", ()),
        (3600, None, "redis://h", ("relock_remember=3600 s is not longer",)),
        (600, 300, "redis://h", ()),
        (300, 300, "sentinel://h:26379", ("relock_remember=300 s is not longer",)),
        (60, None, "amqp://h", ()),
    ],
)
def test_ends_that_are_forgotten_before_a_late_copy_can_come(
    app_with, remember, after, broker, found
):
    options = {} if after is None else {"visibility_timeout": after}
    given = {} if remember is None else {"relock_remember": remember}
    app = app_with(broker_url=broker, broker_transport_options=options, **given)
    findings = doctor.quick(app)
    assert len(findings) == len(found)
    assert all(each.what.startswith(what) for each, what in zip(findings, found, strict=True))


def test_settings_in_a_namespace_of_the_app_are_no_near_misses(server):
    app = Celery("shop", broker=server.url, set_as_current=False, namespace="SHOP")
    app.config_from_object(
        {"SHOP_RELOCK_URL": server.url, "SHOP_RELOCK_MAX_PARKED_MESSAGES": 5000}, namespace="SHOP"
    )
    assert doctor.quick(app) == ()
    app.close()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"relock_tttl": 3}, "Did you mean relock_ttl?"),
        ({"relock_ttl": "long"}, "relock_ttl='long' cannot be used"),
        (
            {"relock_url": "rediss://h", "relock_use_ssl": {"ssl_ca_data": 5}},
            "ssl_ca_data=5 cannot be used",
        ),
        ({"relock_order": "sent", "relock_limit": 3}, "excludes lock_limit=3"),
    ],
)
def test_settings_that_are_wrong_are_found_when_the_workers_are_asked(app_with, settings, what):
    app = app_with(**settings)

    @app.task(base=LockedTask, lock_key="a", name="shop.charge", shared=False)
    def charge(): ...

    found = doctor.examine(app, timeout=0.2).findings
    assert [each.severity for each in found if what in each.what] == ["error"]
    assert "no worker has answered" in only(found, "workers").what


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"relock_enabled": False}, "relock_enabled is False"),
        ({"relock_enabled": False, "relock_url": None, "broker_url": "memory://"}, "is False"),
        ({"relock_url": "memory://"}, "relock_url is memory://"),
    ],
)
def test_settings_that_are_for_tests(app_with, settings, what):
    finding = only(doctor.quick(app_with(**settings)), "settings")
    assert finding.severity == "error"
    assert what in finding.what


def test_settings_of_django_without_the_namespace_of_celery():
    code = """
        from django.conf import settings
        settings.configure(
            RELOCK_TTL=5, LOCK_MAX_WAIT=3, CELERY_RELOCK_URL="redis://127.0.0.1:1/0"
        )
        from celery import Celery
        app = Celery("shop")
        app.config_from_object("django.conf:settings", namespace="CELERY")
        from celery_relock import doctor
        for each in doctor.quick(app):
            print(each.check, each.severity, each.do)
    """
    shown = said_by(code).splitlines()
    assert shown[0] == "settings warning Write CELERY_RELOCK_TTL."
    assert shown[1].startswith("redis error")


def test_replicas_that_are_missing(app_with):
    finding = only(doctor.quick(app_with(relock_min_replicas=1)), "replicas")
    assert finding.severity == "error"


def test_a_task_that_only_looks_locked_and_one_that_cannot_be_loaded(app_with):
    app = app_with()

    @app.task(name="plain", lock_key="a", shared=False)
    def plain():
        pass

    finding = only(doctor.quick(app), "tasks")
    assert "the task plain" in finding.what
    broken = app_with()
    broken.conf.imports = ["no_such_module_of_this_shop"]
    assert "no_such_module" in only(doctor.quick(broken), "tasks").what


def test_an_option_that_is_written_in_another_way(app_with):
    app = app_with()

    @app.task(name="charge", base=LockedTask, key="account:{account}", shared=False)
    def charge(account):
        pass

    finding = only(doctor.quick(app), "tasks")
    assert finding.severity == "warning"
    assert "task charge has key='account:{account}'" in finding.what
    assert finding.do == "Write lock_key=…."


# -- Workers, and what is parked -----------------------------------------------------------------


@pytest.fixture(scope="module")
def worker(module_worker):
    started = module_worker(APP, concurrency=1, arguments=("-Q", "reports,celery"))
    with Lock(started.settings["RELOCK_TEST_URL"], "a", namespace=started.namespace):
        yield started


def of_workers(app):
    """What is found once a worker has told everything in time: a busy machine can be slow."""
    reports = []

    def told():
        reports.append(doctor.examine(app, timeout=2.0))
        return not any("within 2 s" in each.what for each in found(reports[-1], "workers"))

    wait_for(told, what="the worker to answer in time")
    return reports[-1]


def test_workers_tell_of_themselves(worker):
    report = of_workers(worker.module.app)
    assert found(report, "workers") == found(report, "parked") == []
    [told] = report.facts["workers"].values()
    assert told["version"] == report.facts["version"]
    assert told["namespace"] == worker.namespace
    keys = {"charge": "account:{account}", "report": "report:{name}", "index": "index:{name}"}
    assert told["tasks"] == {task: repr(key) for task, key in keys.items()}
    assert worker.settings["RELOCK_TEST_URL"] not in str(report.facts)


def test_workers_whose_locks_are_elsewhere_or_named_otherwise(worker):
    named = _import_afresh(APP, {**worker.settings, "TEST_KEY": "charge:{account}"}).app
    finding = only(of_workers(named), "workers")
    assert finding.severity == "error"
    assert "'account:{account}'" in finding.what
    assert "'charge:{account}'" in finding.what
    other = _import_afresh(APP, worker.settings).app
    other.conf.relock_namespace = "other"
    finding = only(of_workers(other), "workers")
    assert finding.severity == "error"
    assert "relock_namespace" in finding.what
    assert "it has charge, index, report" in finding.what
    moved = _import_afresh(APP, worker.settings).app
    moved.conf.relock_url = moved.conf.relock_url.removesuffix("/0") + "/1"
    assert "another address" in only(of_workers(moved), "workers").what
    unmade = _import_afresh(APP, worker.settings).app
    unmade.conf.relock_url = _no_client
    report = of_workers(unmade)
    assert not found(report, "workers"), "it is not known where the locks are here"
    assert "the vault is not up yet" in only(report, "redis").what


def test_a_worker_with_another_prefix(worker):
    other = _import_afresh(APP, worker.settings).app
    other.conf.relock_prefix = _tenant
    finding = only(of_workers(other), "workers")
    assert finding.severity == "warning"
    what = f"the worker {worker.node} has relock_prefix='', and here it is {__name__}._tenant"
    assert finding.what == what


def _tenant():
    return ""


def test_a_worker_of_another_program_may_have_another_namespace(worker):
    other = Celery("other", set_as_current=False)
    names = ("broker_url", "result_backend", "broker_transport_options", "relock_url")
    other.conf.update({name: worker.module.app.conf[name] for name in names})
    other.conf.relock_namespace = "other"
    assert only(of_workers(other), "workers").severity == "notice"


def test_a_worker_that_runs_a_locked_task_without_the_library(worker, module_worker):
    old = module_worker(
        "tests.doctor.apps.old",
        namespace=worker.namespace,
        concurrency=1,
        arguments=("-n", "old@host"),
    )
    app = worker.module.app
    wait_for(lambda: found(of_workers(app), "workers"), what="both workers to answer")
    finding = only(of_workers(app), "workers")
    assert finding.severity == "error"
    assert finding.what == "the worker old@host runs charge without a lock"
    assert old.stop() == 0


def test_a_worker_whose_locks_are_switched_off(worker, module_worker):
    off = module_worker(
        APP,
        namespace=worker.namespace,
        concurrency=1,
        arguments=("-n", "off@host"),
        env={"TEST_WITHOUT_LOCKS": "1"},
    )
    app = worker.module.app
    wait_for(lambda: found(of_workers(app), "workers"), what="both workers to answer")
    finding = only(of_workers(app), "workers")
    assert finding.severity == "error"
    assert finding.what == "the worker off@host has relock_enabled=False"
    assert off.stop() == 0


def declared_anew(worker, name, body=None, **options):
    """The worker's app, where one task is declared in another way."""
    app = _import_afresh(APP, worker.settings).app
    del app.tasks[name]
    app.task(body or _body_of, name=name, shared=False, **options)
    return app


def test_a_worker_that_has_the_library_and_runs_a_locked_task_without_its_lock(worker):
    newer = declared_anew(worker, "refund", base=LockedTask, lock_key="account:{a}")
    finding = only(of_workers(newer), "workers")
    assert finding.severity == "error"
    assert finding.what == f"the worker {worker.node} runs refund without a lock"
    newer.conf.relock_namespace = "other"
    assert "relock_namespace" in only(of_workers(newer), "workers").what, "it has other locks"


def test_a_worker_that_locks_a_task_which_has_no_lock_here(worker):
    older = declared_anew(worker, "charge")
    finding = only(of_workers(older), "workers")
    assert finding.severity == "error"
    what = "has lock_key='account:{account}' for charge, and here it has no lock"
    assert finding.what == f"the worker {worker.node} {what}"


def test_a_worker_with_another_limit(worker):
    options = {"base": LockedTask, "lock_key": "account:{account}", "lock_limit": 3}
    newer = declared_anew(worker, "charge", _body_of_charge, **options)
    finding = only(of_workers(newer), "workers")
    assert finding.severity == "error"
    what = f"the worker {worker.node} has lock_limit=1 for charge, and here it is 3"
    assert finding.what == what


def test_of_workers_with_several_versions_those_that_differ_are_told(worker):
    app = worker.module.app
    told = of_workers(app).facts["workers"][worker.node]
    workers = {worker.node: told, "old@host": {**told, "version": "0.1.0"}}
    (finding,) = doctor._Workers(workers, {}, set(), True).judge(app, engine_of(app))
    assert finding.what == f"celery-relock is {told['version']} here, and 0.1.0 in workers"


def test_keys_and_limits_of_each_form_are_told_as_text():
    assert key_of({"a": 2, print: 1}) == "{'a': 2, builtins.print: 1}"
    assert key_of([1, 2]) == "[1, 2]"
    assert key_of(str.upper) == "builtins.str.upper"


def test_no_worker_and_no_broker(app_with):
    app = app_with()
    assert "no worker has answered" in only(doctor.examine(app, timeout=0.1), "workers").what
    app.conf.update(broker_url="redis://127.0.0.1:1/0", broker_transport_options={"max_retries": 1})
    assert only(doctor.examine(app, timeout=0.1), "workers").severity == "warning"


def test_parked_executions_whose_queue_nobody_consumes(worker):
    app, tasks = worker.module.app, worker.module
    name = uuid.uuid4().hex
    lock = Lock(app.conf.relock_url, f"report:{name}", namespace=worker.namespace)
    with lock:
        sent = tasks.report.apply_async((name,), task_id=f"report of {name}")
        backend = engine_of(app).backend
        wait_for(lambda: backend.inspect(f"report:{name}").waiting == 1)
        assert found(of_workers(app), "parked") == []
        app.control.cancel_consumer("reports", reply=True)
        wait_for(lambda: found(of_workers(app), "parked"))
        with Redis.from_url(app.conf.relock_url) as client:  # as if it had been published in vain
            (key,) = client.keys(f"{worker.namespace}*w:report:{name}")
            [(run, place)] = client.hgetall(key).items()
            client.hset(key, run, json.dumps({**json.loads(place), "sent": 5}))
        finding = only(of_workers(app), "parked")
        app.control.add_consumer("reports", reply=True)
    assert finding.severity == "error"
    assert f"report[{sent.id}]" in finding.what
    assert "-Q reports" in finding.do
    assert finding.do.endswith(f"relock cancel 'report of {name}'")
    assert sent.get(timeout=20) == 1


def test_a_worker_that_does_not_tell_its_queues_in_time_is_not_taken_for_one_without(
    worker, monkeypatch
):
    app = worker.module.app
    name = uuid.uuid4().hex
    lock = Lock(app.conf.relock_url, f"report:{name}", namespace=worker.namespace)
    monkeypatch.setattr(Inspect, "active_queues", lambda _: None)  # as if no answer had come
    with lock:
        sent = worker.module.report.delay(name)
        wait_for(lambda: engine_of(app).backend.inspect(f"report:{name}").waiting == 1)
        reports = iter(lambda: doctor.examine(app, timeout=2.0), None)
        report = next(each for each in reports if each.facts["workers"])
    assert found(report, "parked") == []
    assert "answered in part only" in only(report, "workers").what
    assert sent.get(timeout=20) == 1


def test_parked_executions_that_nobody_can_resume(app_with, namespace, monkeypatch):
    monkeypatch.setattr(doctor, "_OWED", -1.0)
    app = app_with()
    app.conf.relock_namespace = namespace
    backend = engine_of(app).backend
    claims = [Claim(run, f"of {run}".replace(" ", "-"), run, ("a",), (1,), 30.0) for run in "xy"]
    text = json.dumps({"home": "gone", "queue": "q", "headers": {"task": "charge", "id": "7"}})
    backend.acquire(claims[0])
    backend.park(claims[1], ParkRequest(text, "gone", "7"))
    backend.release(Release(("a",), "x", "of-x"))
    of_others, owed = sorted(
        found(doctor.examine(app, workers=False), "parked"), key=lambda each: -len(each.severity)
    )
    assert (of_others.severity, owed.severity) == ("notice", "error")
    assert "charge" in of_others.what
    assert owed.what.endswith("no process has published 1 parked task whose turn has come")


def test_parked_executions_of_which_only_workers_without_the_library_read_the_queue(new_worker):
    """As after a rollback."""
    old = new_worker("tests.doctor.apps.old", concurrency=1)
    app = _import_afresh(APP, old.settings).app
    backend, of, queue = engine_of(app).backend, home(app), app.conf.task_default_queue
    claims = [Claim(run, f"of-{run}", run, ("a",), (1,), 30.0) for run in "xy"]
    text = json.dumps({"home": of, "queue": queue, "headers": {"task": "charge", "id": "7"}})
    backend.acquire(claims[0])
    backend.park(claims[1], ParkRequest(text, of, "7"))

    finding = only(of_workers(app), "parked")

    assert finding.severity == "error"
    assert finding.what.startswith("no worker that answers has celery-relock, and there are parked")
    assert "charge[7] for the lock 'a'" in finding.what
    assert finding.do.endswith("relock cancel 7")
    nobody = "; no worker that answers has celery-relock, and no other one resumes it"
    assert Locks(app).why("7").sentence.endswith(nobody)
    backend.announce([channel(of, queue)], "busy", 30.0)  # one that does not answer
    assert found(of_workers(app), "parked") == []
    assert nobody not in Locks(app).why("7").sentence


def test_parked_executions_that_are_handed_out_in_vain(app_with, namespace):
    app = app_with()
    app.conf.relock_namespace = namespace
    backend = engine_of(app).backend
    claims = [Claim(run, f"of-{run}", run, ("a",), (1,), 30.0) for run in "xy"]
    of = home(app)
    text = json.dumps({"home": of, "queue": "q", "headers": {"task": "charge", "id": "7"}})
    backend.acquire(claims[0])
    backend.park(claims[1], ParkRequest(text, of, "7"))
    backend.release(Release(("a",), "x", "of-x", homes=of))

    def told():
        report = doctor.examine(app, workers=False)
        (parked,) = report.facts["parked_sample"]
        whys = Locks(app).why("7").sentence
        return parked["sent"], [each.what for each in found(report, "parked")], whys

    sent, findings, why = told()
    assert sent == 1
    assert "again and again" not in "".join(findings)
    nobody = "; no worker that answers consumes its queue 'q'"
    assert why.endswith(f"its message is on its way to a worker{nobody}")
    with Redis.from_url(app.conf.relock_url) as client:  # as if minutes had passed
        (key,) = client.keys(f"{namespace}*w:a")
        place = json.loads(client.hget(key, "y"))
        client.hset(key, "y", json.dumps({**place, "sent": 5}))
    sent, findings, why = told()
    assert sent == 5
    assert "charge[7] for the lock 'a', whose message was handed out 5 times" in "".join(findings)
    assert why.endswith(
        f"its message is on its way to a worker (it was handed out 5 times){nobody}"
    )


def test_bursts_that_no_worker_sends(worker):
    app = worker.module.app
    sent = app.tasks["index"].delay("a")
    assert found(of_workers(app), "bursts") == []
    web = _import_afresh(APP, worker.settings).app
    web.conf.broker_url = web.conf.broker_url.replace("127.0.0.1", "localhost")
    unsent = web.tasks["index"].delay("b")
    report = of_workers(app)
    assert found(report, "parked") == []
    finding = only(report, "bursts")
    assert finding.severity == "warning"
    assert f"index[{unsent.id}]" in finding.what
    begins_here, waits = found(of_workers(web), "bursts")
    assert begins_here.severity == "error"
    assert "the bursts of index that begin here" in begins_here.what
    assert waits == finding
    # Without workers nobody knows who would send it.
    quiet = found(doctor.examine(app, workers=False), "parked")
    assert [each.severity for each in quiet] == ["notice"]
    assert Locks(app).cancel(sent.id)
    assert Locks(web).cancel(unsent.id)


def test_results_of_bursts_that_go_to_one_caller_alone(app_with):
    def body():
        pass

    app = app_with(result_backend="rpc://")
    for name, more in (("index", {"lock_debounce": 5}), ("plain", {})):
        for ignore in (False, True):
            options = {"name": f"{name}-{ignore}", "ignore_result": ignore, **more}
            app.task(base=LockedTask, lock_key="a", shared=False, **options)(body)
    finding = only(doctor.quick(app), "bursts")
    assert finding.what.startswith("index-False: ")
    app.conf.result_backend = "redis://127.0.0.1:1"
    assert found(doctor.quick(app), "bursts") == []


def test_results_that_go_once_to_the_first_of_equal_calls(app_with):
    app = app_with(result_backend="rpc://")
    for name, more in (("shared", {}), ("refused", {"lock_on_duplicate": "raise"})):
        options = {"lock_key": "a", "lock_dedup": "until_start", "name": name, **more}
        app.task(base=LockedTask, shared=False, **options)(_body)
    assert only(doctor.quick(app), "tasks").what.startswith("shared: a duplicate shares one result")


def test_a_setting_by_which_celery_sends_a_step_without_its_lock(app_with):
    app = app_with(worker_deduplicate_successful_tasks=True)
    assert found(doctor.quick(app), "settings") == []
    app.task(base=LockedTask, lock_key="a", name="locked", shared=False)(_body)
    assert "worker_deduplicate_successful_tasks" in only(doctor.quick(app), "settings").what


def test_limits_of_one_lock_that_differ(app_with):
    app = app_with()
    for name, options in {
        "charge": {"lock_key": "account:{a}"},
        "transfer": {"lock_key": ["account:{a}", "bank"], "lock_limit": [1, 3]},
        "read": {"lock_key": "account:{a}", "lock_mode": "shared"},
        "ask": {"lock_key": "bank", "lock_limit": 3},
    }.items():
        app.task(base=LockedTask, name=name, shared=False, **options)(_body_of)
    assert found(doctor.quick(app), "tasks") == []
    options = {"lock_key": "account:{a}", "lock_limit": 2}
    app.task(base=LockedTask, name="checkout", shared=False, **options)(_body_of)
    finding = only(doctor.quick(app), "tasks")
    assert finding.severity == "error"
    assert "charge has lock_limit=1, checkout has lock_limit=2" in finding.what


def test_limits_of_names_that_differ_by_their_task(app_with):
    """`{task}` and `{self…}` are another text in each task, unless an argument is called so."""
    app = app_with()
    for name, options in {
        "one": {"lock_key": ["{task}:{a}", "{self.queue}:{a}"]},
        "two": {"lock_key": ["{task}:{a}", "{self.queue}:{a}"], "lock_limit": 5},
    }.items():
        app.task(base=LockedTask, name=name, shared=False, **options)(_body_of)
    assert found(doctor.quick(app), "tasks") == []
    for name, limit in (("three", 1), ("four", 5)):
        options = {"lock_key": "{task}", "lock_limit": limit}
        app.task(base=LockedTask, name=name, shared=False, **options)(_body_of_task)
    what = only(doctor.quick(app), "tasks").what
    assert "lock_key='{task}', three has lock_limit=1, four has lock_limit=5" in what


def test_limits_that_differ_from_one_of_a_mapping(app_with):
    app = app_with()
    for name, options in {
        "ask": {"lock_key": "jobs:{a}"},
        "call": {"lock_key": "jobs"},
        "work": {"lock_key": ["jobs", "jobs:{a}"], "lock_limit": {"jobs": 150}},
    }.items():
        app.task(base=LockedTask, name=name, shared=False, **options)(_body_of)
    what = only(doctor.quick(app), "tasks").what
    assert "lock_key='jobs', call has lock_limit=1, work has lock_limit=150" in what


def _body():
    pass


def _body_of(a):
    pass


def _body_of_task(task):
    pass


def _body_of_charge(account):
    pass


# -- The command ---------------------------------------------------------------------------------


def command(worker, *words):
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "relock", "doctor", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **worker.settings},
    )


def test_the_command_prints_what_why_and_what_to_do_and_ends_as_asked(worker):
    shown = command(worker, "--timeout", "0.7")
    assert shown.returncode == 1  # the tests' server keeps nothing on disk
    assert "WARNING: the server keeps nothing on disk\n  why: " in shown.stdout
    assert f"worker: {worker.namespace}@127.0.0.1, celery-relock" in shown.stdout
    told = command(worker, "--json", "--no-workers", "--fail-on", "error")
    assert told.returncode == 0
    document = json.loads(told.stdout)
    # The tests' server has the namespaces of other tests as well.
    checks = [each["check"] for each in document["findings"] if each["severity"] != "notice"]
    assert checks == ["persistence"]
    assert set(document["findings"][0]) == {"check", "severity", "what", "why", "do"}
    assert "workers" not in document["facts"]


def test_without_redis_the_command_says_so_without_a_trace(worker):
    away = command(worker, "--redis", "redis://127.0.0.1:1/0")
    assert away.returncode == 1
    assert "cannot be reached" in away.stdout
    assert away.stderr == ""
