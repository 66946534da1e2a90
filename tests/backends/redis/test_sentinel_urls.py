"""How a place with Sentinels is written, whose password is whose, and what is told of a mistake."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
from redis import CredentialProvider
from redis.sentinel import Sentinel

from celery_relock.backends.redis.urls import transport_for_url
from celery_relock.engine.protocol import Held
from celery_relock.engines import engine_for
from celery_relock.errors import LockConfigError, LockUnavailable
from celery_relock.lock import Lock
from tests.support import RedisServer
from tests.support.ports import free_port
from tests.support.runs import Runs
from tests.support.sentinel import Watched, Watcher
from tests.support.tls import Authority, speaks_tls

TIMEOUT = "socket_timeout"
MASTERS, SENTINELS = "p@ss/w:o;rd", "s3ntinels"


@pytest.fixture(scope="module")
def service(redis_binary: str) -> Iterator[Watched]:
    """With a password for the servers, and another one for the Sentinels."""
    started = Watched(
        redis_binary, replicas=1, sentinels=2, password=MASTERS, sentinel_password=SENTINELS
    )
    yield started
    started.stop()


def hosts_of(service: Watched) -> list[tuple[str, int]]:
    return [("127.0.0.1", each.port) for each in service.sentinels]


def client_of(service: Watched, **options: Any) -> redis.Redis:
    """As a user of redis-py makes it."""
    secret = {"password": SENTINELS}
    found = Sentinel(hosts_of(service), sentinel_kwargs=secret)
    return found.master_for(service.service, password=MASTERS, **options)


def works(place: Any, namespace: str, transport: Any = None) -> Runs:
    runs = Runs(engine_for(place, namespace, None, transport))
    assert runs.release(runs.held("a"))
    return runs


def test_a_list_of_sentinels_as_celery_writes_it_leads_to_the_master(
    service: Watched, namespace: str
) -> None:
    works(service.url, namespace, service.transport)
    works(f"{service.url};", namespace, service.transport)
    works(service.url.replace("/0", ""), namespace, service.transport)
    works(service.url.replace("sentinel:", "SENTINEL:"), namespace, service.transport)


def test_a_login_beside_the_url_is_the_masters(service: Watched, namespace: str) -> None:
    plain = service.url.replace(f":{quote(MASTERS, safe='')}@", "")
    assert plain != service.url
    works(plain, namespace, {**service.transport, "login": {"password": MASTERS}})


def test_the_name_of_the_master_may_stand_in_the_url(service: Watched, namespace: str) -> None:
    secret = {"sentinel_kwargs": {"password": SENTINELS}}
    works(f"{service.url}?master_name={service.service}", namespace, secret)
    first, second = service.url.split(";sentinel")
    works(f"{first}?master_name={service.service};sentinel{second}", namespace, secret)


@pytest.mark.parametrize("options", [{}, {"db": 3}, {"protocol": 3}, {"socket_timeout": None}])
def test_a_client_of_redis_py_that_follows_the_master_is_taken(
    service: Watched, namespace: str, options: dict[str, Any]
) -> None:
    client = client_of(service, **options)
    works(client, namespace)
    with Lock(client, "b", namespace=namespace), client.lock("c", lock_class=Lock):
        url = f"{service.master().url[:-1]}{options.get('db', 0)}"
        with redis.Redis.from_url(url) as database:
            assert database.exists(f"{namespace}:{{0}}:l:b", "relock:{0}:l:c") == 2
    assert not client.connection_pool._available_connections or options, "not used by the locks"


def test_a_silent_master_is_found_out_soon_unless_told_otherwise() -> None:
    def seconds(url: str) -> float:
        made: Any = transport_for_url(url, None, {"master_name": "shop"})
        return float(made.at("")._options[TIMEOUT])

    assert seconds("sentinel://a;sentinel://b") == 2.0
    assert seconds(f"sentinel://a?{TIMEOUT}=7;sentinel://b") == 7.0
    # Options are read from the first one alone.
    assert seconds(f"sentinel://a;sentinel://b?{TIMEOUT}=7") == 2.0


def test_a_way_of_the_clients_own_to_tell_the_address_is_kept(
    service: Watched, namespace: str
) -> None:
    """Such as behind a translation of addresses."""
    asked = []

    class Translating(Sentinel):
        def discover_master(self, service_name: str) -> tuple[str, int]:
            asked.append(service_name)
            return "127.0.0.1", service.servers[0].port

    found = Translating([("192.0.2.1", 1)]).master_for("anything", password=MASTERS)
    works(found, namespace)
    assert set(asked) == {"anything"}


def test_a_backend_is_the_same_however_it_is_reached(service: Watched, namespace: str) -> None:
    by_url = engine_for(service.url, namespace, None, service.transport).backend
    turned = ";".join(reversed(service.url.split(";"))).replace("127.0.0.1", "localhost")
    stores = [
        engine_for(turned, namespace, None, service.transport).backend,
        engine_for(client_of(service), namespace).backend,
        engine_for(lambda: client_of(service), namespace).backend,
    ]
    for backend in stores:
        assert backend == by_url
        assert backend.id == by_url.id
    other = {**service.transport, "master_name": "other"}
    assert engine_for(service.url, namespace, None, other).backend != by_url
    assert engine_for(client_of(service, db=1), namespace).backend != by_url
    assert engine_for(client_of(service), namespace) is engine_for(client_of(service), namespace)


def test_what_an_address_is_called_shows_no_password(service: Watched) -> None:
    made = transport_for_url(service.url, None, service.transport)
    shown = f"{made.addresses} {made.fingerprint} {made!r}"
    assert service.service in shown
    assert SENTINELS not in shown
    assert MASTERS not in shown


def refusal(url: str, transport: Any = None, kind: type[Exception] = LockConfigError) -> str:
    """The message of the error; the time that it takes is bounded."""
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        Runs(engine_for(url, "ns", None, transport)).held("a")
    assert time.monotonic() - started < 20
    assert type(caught.value) is kind
    message = str(caught.value)
    assert MASTERS not in message
    assert SENTINELS not in message
    return message


def test_a_missing_name_is_told(service: Watched) -> None:
    assert "relock_transport_options" in refusal(service.url)
    assert "relock_transport_options" in refusal(service.url, {"master_name": ""})


def test_a_name_that_no_sentinel_knows_is_told_with_those_that_they_know(service: Watched) -> None:
    message = refusal(service.url, {**service.transport, "master_name": "shoq"})
    assert "no service 'shoq', but 'shop'" in message
    assert "master_name" in message


def test_a_wrong_password_for_the_sentinels_is_told(service: Watched) -> None:
    for secret in ({}, {"password": "wrong"}):
        message = refusal(service.url, {**service.transport, "sentinel_kwargs": secret})
        assert "sentinel_kwargs" in message


def test_a_wrong_password_for_the_master_is_told(service: Watched) -> None:
    url = service.url.replace(quote(MASTERS, safe=""), "wrong")
    assert "relock_url" in refusal(url, service.transport)


def test_the_address_of_a_redis_instead_of_a_sentinel_is_told(redis_server: RedisServer) -> None:
    url = f"sentinel://127.0.0.1:{redis_server.port}"
    assert "port of the Sentinels" in refusal(url, {"master_name": "shop"})


def test_sentinels_that_do_not_answer_are_told() -> None:
    ports = free_port(), free_port()
    url = ";".join(f"sentinel://127.0.0.1:{port}" for port in ports)
    message = refusal(url, {"master_name": "shop"}, LockUnavailable)
    assert "no Sentinel answers" in message
    assert all(str(port) in message for port in ports)


def test_a_sentinel_that_knows_too_few_others_is_not_believed(service: Watched) -> None:
    transport = {**service.transport, "min_other_sentinels": 2, "patience": 0.5}
    assert "min_other_sentinels=2" in refusal(service.url, transport, LockUnavailable)


@pytest.mark.parametrize(
    ("url", "transport", "says"),
    [
        ("sentinel://a;sentinel://b/3", {}, "from the first Sentinel"),
        ("sentinel://a:1;b:2/0", {}, "before each Sentinel"),
        ("sentinel://:p;w@a,b", {}, "before each Sentinel"),
        ("sentinel://a/x", {}, "must be a number"),
        ("sentinel://a", {"sentinel_kwargs": "secret"}, "must be a dict, not str"),
        ("sentinel://a", {"sentinel_kwargs": {"pasword": "secret"}}, "sentinel_kwargs"),
        *(
            ("sentinel://a", {"sentinel_kwargs": {"ssl": True, **tls}}, "sentinel_kwargs: ssl_")
            for tls in ({"ssl_ca_certs": "/no/such.pem"}, {"ssl_ca_data": 5})
        ),
        *(
            ("sentinel://a", {"sentinel_kwargs": refused}, f"sentinel_kwargs: .*{says}")
            for refused, says in (
                ({"socket_timeout": -1}, "seconds above 0"),
                ({"socket_connect_timeout": "5"}, "seconds above 0"),
                ({"password": "p", "credential_provider": object()}, "only one of"),
            )
        ),
        ("sentinel://a", {"min_other_sentinels": "two"}, "numbers"),
        ("sentinel://a", {"patience": 10**400}, "numbers"),
        ("sentinel://a?patience=inf", {}, "patience='inf' cannot be used"),
        ("sentinel://a?min_other_sentinels=inf", {}, "min_other_sentinels='inf' cannot be used"),
        ("sentinel://a", {"patience": -1}, "numbers"),
        ("sentinel://a?ssl_cert_reqs=often", {}, "ssl_cert_reqs"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(url: str, transport: Any, says: str) -> None:
    with pytest.raises(LockConfigError, match=says):
        transport_for_url(url, None, {"master_name": "shop", **transport})


def test_while_a_provider_of_the_sentinels_password_fails_redis_cannot_be_reached(
    service: Watched,
) -> None:
    class Sealed(CredentialProvider):
        def get_credentials(self) -> tuple[str, str]:
            raise ArithmeticError("the vault is sealed")

    transport = {**service.transport, "sentinel_kwargs": {"credential_provider": Sealed()}}
    assert "the vault is sealed" in refusal(service.url, transport, LockUnavailable)


def test_without_tls_its_options_for_the_sentinels_are_passed_over() -> None:
    off = {"ssl": False, "ssl_ca_certs": "/no/such.pem"}
    transport_for_url("sentinel://a", None, {"master_name": "shop", "sentinel_kwargs": off})


def test_a_user_of_the_sentinels_needs_two_permissions(
    redis_binary: str, redis_server: RedisServer, namespace: str
) -> None:
    watch = f"sentinel monitor shop 127.0.0.1 {redis_server.port} 1"
    rights = "+sentinel|masters +sentinel|get-master-addr-by-name"
    user = f"user locks on >secret -@all {rights}\nuser default off"
    watcher = Watcher(redis_binary, f"{watch}\n{user}")
    login = {"username": "locks", "password": "secret"}
    try:
        transport = {"master_name": "shop", "sentinel_kwargs": login}
        works(f"sentinel://127.0.0.1:{watcher.port}", namespace, transport)
    finally:
        watcher.stop()


def test_a_sentinel_is_asked_over_a_unix_socket(
    redis_binary: str, redis_server: RedisServer, tmp_path: Path, namespace: str
) -> None:
    watch, path = f"sentinel monitor shop 127.0.0.1 {redis_server.port} 1", tmp_path / "s.sock"
    watcher = Watcher(redis_binary, f"{watch}\nunixsocket {path}")
    try:
        transport = {"master_name": "shop", "sentinel_kwargs": {"unix_socket_path": str(path)}}
        works("sentinel://none", namespace, transport)
    finally:
        watcher.stop()


def test_a_client_of_replicas_is_refused(service: Watched, namespace: str) -> None:
    replicas = Sentinel(hosts_of(service)).slave_for(service.service)
    with pytest.raises(LockConfigError, match="master_for"):
        engine_for(replicas, namespace)


def test_the_master_and_the_sentinels_by_tls(
    redis_binary: str,
    own_redis: Callable[..., RedisServer],
    tmp_path: Path,
    namespace: str,
) -> None:
    if not speaks_tls(redis_binary):
        pytest.skip("this Redis was built without TLS")
    try:
        authority = Authority(tmp_path)
    except FileNotFoundError:
        pytest.skip("no openssl command")
    port = free_port()
    own_redis(*authority.server_config(port=port))
    certificate, key = authority.certificate("worker")
    ports = free_port(), free_port()
    own = " ".join(authority.server_config(port=ports[1])).replace(" --", "\n").removeprefix("--")
    config = f"{own}\ntls-replication yes\nsentinel monitor shop 127.0.0.1 {port} 1"
    watcher = Watcher(redis_binary, config)
    files = {"ssl_ca_certs": authority.ca, "ssl_certfile": certificate, "ssl_keyfile": key}
    ssl = {**files, "ssl_check_hostname": False}
    transport = {"master_name": "shop", "sentinel_kwargs": {"ssl": True, **ssl}}
    try:
        url = f"sentinel://127.0.0.1:{ports[1]}/0"
        runs = Runs(engine_for(url, namespace, ssl, transport))
        assert isinstance(runs.engine.acquire(lease := runs.lease("a"), 0.0), Held)
        assert runs.release(lease)
        client = Sentinel([("127.0.0.1", ports[1])], sentinel_kwargs={"ssl": True, **ssl})
        works(client.master_for("shop", ssl=True, **ssl), namespace)
    finally:
        watcher.stop()


def test_sentinels_whose_names_are_looked_up_for_long_are_given_up_as_silent_ones(
    monkeypatch: pytest.MonkeyPatch, namespace: str
) -> None:
    over, names = threading.Event(), ("one.invalid", "two.invalid", "three.invalid")

    def hang(*_: Any, **__: Any) -> Any:
        over.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    url = ";".join(f"sentinel://{name}:26379" for name in names)
    engine = engine_for(url, namespace, None, {"master_name": "shop"})
    started = time.monotonic()
    try:
        with pytest.raises(LockUnavailable, match=r"one.invalid:26379: no connection in time"):
            Runs(engine).held("a")
        assert time.monotonic() - started < 8
    finally:
        over.set()
