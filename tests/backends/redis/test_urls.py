"""Pools from URLs: every spelling that Celery takes connects, and no error shows a password."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis
import redis.asyncio

from celery_relock.asyncio import Lock
from celery_relock.backends.redis.errors import translate
from celery_relock.backends.redis.urls import (
    safe_url,
    transport_for_client,
    transport_for_url,
)
from celery_relock.errors import LockConfigError, LockUnavailable
from tests.support import RedisServer
from tests.support.backends import client_of, options_of
from tests.support.tls import Authority, speaks_tls

PASSWORD = "p@ss/w:o#r?d%&;"
Connect = Callable[..., redis.Redis]


@pytest.fixture
def connect() -> Iterator[Connect]:
    clients: list[redis.Redis] = []

    def make(url: str, ssl: Any = None) -> redis.Redis:
        clients.append(client_of(url, ssl))
        return clients[-1]

    yield make
    for client in clients:
        client.connection_pool.disconnect()


def made_of(url: str, ssl: Any = None) -> dict[str, Any]:
    kind, options = options_of(url, ssl)
    kind(**options)  # this redis-py takes every one of them
    return dict(options)


def refusal(url: str, ssl: Any = None) -> str:
    with pytest.raises(LockConfigError) as caught:
        transport_for_url(url, ssl)
    assert caught.value.__cause__ is None or "secret" not in str(caught.value.__cause__)
    return str(caught.value)


def test_a_pool_connects_under_the_name_of_the_library(redis_url: str, connect: Connect) -> None:
    client = connect(redis_url)

    assert client.ping()
    assert client.client_getname() in ("celery-relock", b"celery-relock")


def test_user_and_password_arrive_unescaped(
    own_redis: Callable[..., RedisServer], connect: Connect
) -> None:
    server = own_redis()
    server.client().execute_command("ACL", "SETUSER", "us@r", "on", f">{PASSWORD}", "~*", "+@all")
    login = f"{quote('us@r', safe='')}:{quote(PASSWORD, safe='')}"
    client = connect(f"redis://{login}@127.0.0.1:{server.port}/3")

    assert client.execute_command("ACL", "WHOAMI") in ("us@r", b"us@r")


def test_a_password_alone_logs_in(own_redis: Callable[..., RedisServer], connect: Connect) -> None:
    assert connect(own_redis(password=PASSWORD).url).ping()


@pytest.mark.parametrize(
    ("tail", "database"), [("", 0), ("/", 0), ("/3", 3), ("?db=4", 4), ("/?virtual_host=5", 5)]
)
def test_the_database_is_found(
    redis_server: RedisServer, connect: Connect, tail: str, database: int
) -> None:
    client = connect(f"redis://127.0.0.1:{redis_server.port}{tail}")

    assert f" db={database} " in str(client.execute_command("CLIENT", "LIST", "ID", _id(client)))


def _id(client: redis.Redis) -> int:
    return int(client.client_id())


@pytest.mark.parametrize(
    "url",
    [
        "unix://{path}",
        "unix://{path}?db=2",
        "unix://{path}?password={password}",
        "unix://:{password}@{path}",
        "socket://{path}",
        "redis+socket://{path}",
        "redis+socket://{path}?virtual_host=2",
        "redis+socket://:{password}@{path}?db=2",
    ],
)
def test_a_unix_socket_connects_in_every_spelling(
    own_redis: Callable[..., RedisServer], connect: Connect, tmp_path: Path, url: str
) -> None:
    path = tmp_path / "redis.sock"
    secret = {"password": PASSWORD} if "{password}" in url else {}
    own_redis("--unixsocket", str(path), **secret)
    client = connect(url.format(path=path, password=quote(PASSWORD, safe="")))

    assert client.ping()
    database = 2 if "=2" in url else 0
    assert client.connection_pool.connection_kwargs["db"] in (database, str(database))


def test_a_server_with_tls_connects_however_celery_writes_its_options(
    own_redis: Callable[..., RedisServer], connect: Connect, certificate: dict[str, str]
) -> None:
    port = tls_server(own_redis, certificate)
    ca = certificate["ssl_ca_certs"]
    url, plain = f"rediss://localhost:{port}/0", f"redis://localhost:{port}/0"

    assert connect(url, {"ssl_ca_certs": ca}).ping()
    assert connect(f"{url}?ssl_cert_reqs=required&ssl_ca_certs={quote(ca, safe='')}").ping()
    for checked in ("required", "CERT_REQUIRED", "optional", ssl.CERT_REQUIRED, ssl.CERT_OPTIONAL):
        assert connect(url, {"ssl_cert_reqs": checked, "ssl_ca_certs": ca}).ping()
    for unchecked in ("none", "CERT_NONE", ssl.CERT_NONE, None):
        assert connect(url, {"ssl_cert_reqs": unchecked}).ping()
    assert connect(f"{url}?ssl_cert_reqs=CERT_NONE").ping()
    assert connect(f"{url}?ssl_check_hostname=false", {"ssl_ca_certs": ca}).ping()
    # As in Celery, the options alone make it TLS.
    assert connect(plain, {"ssl_ca_certs": ca}).ping()


def test_a_certificate_that_nobody_vouches_for_is_refused_by_default(
    own_redis: Callable[..., RedisServer], connect: Connect, certificate: dict[str, str]
) -> None:
    port = tls_server(own_redis, certificate)

    for client in (
        connect(f"rediss://localhost:{port}/0"),
        connect(f"redis://localhost:{port}/0", True),
    ):
        with pytest.raises(redis.ConnectionError) as caught:
            client.ping()
        told = translate(caught.value)
        assert isinstance(told, LockConfigError)
        assert "relock_use_ssl" in str(told)


def test_a_client_certificate_is_shown(
    own_redis: Callable[..., RedisServer], connect: Connect, certificate: dict[str, str]
) -> None:
    port = tls_server(own_redis, certificate, "--tls-auth-clients", "yes")

    assert connect(f"rediss://localhost:{port}/0", certificate).ping()


def test_a_renewed_certificate_counts_for_the_next_connection(
    own_redis: Callable[..., RedisServer], certificate: dict[str, str], tmp_path: Path
) -> None:
    port, file = tls_server(own_redis, certificate), tmp_path / "ca.pem"
    Authority(tmp_path)  # in that file: another than the server's
    transport = transport_for_url(f"rediss://localhost:{port}/0", {"ssl_ca_certs": str(file)})
    with pytest.raises(LockConfigError, match="CERTIFICATE_VERIFY_FAILED"):
        transport.at("").answers(("PING",))
    file.write_bytes(Path(certificate["ssl_ca_certs"]).read_bytes())

    assert transport.at("").answers(("PING",))


def tls_server(
    own_redis: Callable[..., RedisServer], certificate: dict[str, str], *more: str
) -> int:
    """Start a server with TLS. Returns its TLS port, free a moment ago."""
    probe = own_redis()
    port = probe.port
    probe.stop()
    own_redis(
        *("--tls-port", str(port), "--tls-auth-clients", "no"),
        *("--tls-cert-file", certificate["ssl_certfile"]),
        *("--tls-key-file", certificate["ssl_keyfile"]),
        *("--tls-ca-cert-file", certificate["ssl_ca_certs"]),
        *more,
    )
    return port


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory, redis_binary: str) -> dict[str, str]:
    """A certificate for localhost that vouches for itself, as Celery's options name its files."""
    folder = tmp_path_factory.mktemp("tls")
    key, own = folder / "key.pem", folder / "own.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    try:
        subprocess.run(
            [*made, "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", own],
            check=True,
            capture_output=True,
        )
    except FileNotFoundError:
        pytest.skip("no openssl command")
    if not speaks_tls(redis_binary):
        pytest.skip("this Redis was built without TLS")
    return {"ssl_ca_certs": str(own), "ssl_certfile": str(own), "ssl_keyfile": str(key)}


def test_a_server_that_is_silent_is_given_up_within_the_timeouts() -> None:
    options = made_of("redis://h")

    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (5.0, 2.0)


def test_redis_py_repeats_nothing_by_itself(connect: Connect) -> None:
    calls = 0
    with socket.create_server(("127.0.0.1", 0)) as door:

        def hang_up() -> None:
            nonlocal calls
            while True:
                try:
                    caller, _ = door.accept()
                except OSError:
                    return
                calls += 1
                caller.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(redis.ConnectionError):
            connect(f"redis://127.0.0.1:{door.getsockname()[1]}").ping()
        door.shutdown(socket.SHUT_RDWR)
        thread.join(30)

    assert calls == 1


def test_what_only_celery_needs_is_passed_over_and_what_connects_is_kept(
    redis_url: str, connect: Connect
) -> None:
    query = "visibility_timeout=3600&retry_on_timeout=1&decode_responses=true&global_keyprefix=x"
    client = connect(f"{redis_url}?{query}&socket_timeout=1.5&socket_keepalive=yes")
    kept = client.connection_pool.connection_kwargs

    assert client.echo("answer") == b"answer"
    assert (kept["socket_timeout"], kept["socket_keepalive"]) == (1.5, True)


@pytest.mark.parametrize("name", ["socket_foo", "socket_type", "socket_keepalive_options"])
def test_a_socket_option_that_is_not_in_the_docs_is_passed_over(name: str) -> None:
    assert name not in made_of(f"redis://h?{name}=5")


def test_a_unix_socket_takes_no_option_of_tcp() -> None:
    assert "socket_keepalive" not in made_of("unix:///run/redis.sock?socket_keepalive=1")


def test_a_query_is_unquoted_once(tmp_path: Path) -> None:
    odd = tmp_path / "a%20b"
    odd.mkdir()

    kept = made_of(f"rediss://h?ssl_ca_path={quote(str(odd), safe='')}")

    assert kept["ssl_ca_path"] == str(odd)


class Credentials(redis.CredentialProvider):
    def get_credentials(self) -> tuple[str, str]:
        return "default", PASSWORD


class Sealed(Credentials):
    """A provider that asks somebody when it is made."""

    is_sealed = True

    def __init__(self) -> None:
        if self.is_sealed:
            raise RuntimeError("the vault is sealed")


def test_a_credential_provider_that_cannot_be_made_yet_is_an_outage(
    own_redis: Callable[..., RedisServer], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_redis(password=PASSWORD)
    monkeypatch.setitem(sys.modules, "shop_credentials", sys.modules[__name__])
    url = f"redis://127.0.0.1:{server.port}/0?credential_provider=shop_credentials.Sealed"
    transport = transport_for_url(url)

    with pytest.raises(LockUnavailable, match="the vault is sealed") as away:
        transport.at("").answers(("PING",))
    assert "TLS" not in str(away.value)
    monkeypatch.setattr(Sealed, "is_sealed", False)

    assert transport.at("").answers(("PING",))


class ForCoroutines(redis.CredentialProvider):
    async def get_credentials_async(self) -> tuple[str, str]:
        return "default", PASSWORD


def test_a_credential_provider_for_coroutines_alone_is_refused(
    own_redis: Callable[..., RedisServer],
) -> None:
    server = own_redis(password=PASSWORD)
    client = redis.asyncio.Redis(port=server.port, credential_provider=ForCoroutines())

    async def acquire() -> None:
        await Lock(client, "a").acquire()

    with pytest.raises(LockConfigError, match="has no get_credentials:"):
        asyncio.run(acquire())


@pytest.mark.parametrize("provider", ["shop_credentials.Credentials", Credentials()])
def test_a_login_beside_the_url_is_used_where_the_url_has_none(
    own_redis: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch, provider: object
) -> None:
    server = own_redis(password=PASSWORD)
    monkeypatch.setitem(sys.modules, "shop_credentials", sys.modules[__name__])

    def logs_in(user: str, **login: object) -> bool:
        url = f"redis://{user}127.0.0.1:{server.port}/0"
        (answer,) = transport_for_url(url, None, {"login": login}).at("").answers(("PING",))
        return bool(answer == b"PONG")

    assert logs_in("", credential_provider=provider)
    assert logs_in("", username="default", password=PASSWORD)
    assert logs_in(f":{quote(PASSWORD, safe='')}@", password="of another Redis")


def test_a_credential_provider_is_named_as_in_celerys_urls(
    own_redis: Callable[..., RedisServer], connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_redis(password=PASSWORD)
    monkeypatch.setitem(sys.modules, "shop_credentials", sys.modules[__name__])
    address = f"redis://127.0.0.1:{server.port}/0"

    assert connect(f"{address}?credential_provider=shop_credentials.Credentials").ping()
    assert "credential_provider" in refusal(
        f"{address}?credential_provider=shop_credentials.Nobody"
    )


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "the URL of the Redis is empty"),
        ("localhost:6379", "not the URL of a Redis"),
        ("user:secret@localhost:6379", "not the URL of a Redis"),
        ("amqp://user:secret@h", "not the URL of a Redis"),
        ("redis://:sec/ret@h/0", "%2F"),
        ("redis://:sec#ret@h/0", "%23"),
        ("redis://:sec?ret@h/0", "%3F"),
        ("redis://:12/secret@h/0", "%2F"),
        ("redis://:p@x/secret@h/0", "@ as %40"),
        ("redis://:12#secret@h/0", "%23"),
        ("redis://:12?secret@h/0", "%3F"),
        ("redis://user:secret", "is not a URL"),
        ("redis://h:99999/0", "is not a URL"),
        ("redis://[::1/0", "is not a URL"),
        ("redis://:secret@h/prod", "database"),
        ("redis://:secret@h?db=-1", "database"),
        ("redis://:secret@h?socket_timeout=soon", "socket_timeout='soon'"),
        ("redis://:secret@h?socket_timout=1", "Did you mean socket_timeout?"),
        ("redis://:secret@h?scket_timeout=1", "Did you mean socket_timeout?"),
        ("redis://:secret@h?ssl=true", "rediss:// asks for TLS"),
        ("redis://:secret@h?socket_timeout=-1", "socket_timeout=-1.0 cannot be used"),
        ("redis://:secret@h?socket_timeout=nan", "socket_timeout=nan cannot be used"),
        ("redis://:secret@h?socket_connect_timeout=inf", "socket_connect_timeout=inf cannot"),
        *(
            (
                f"redis://:secret@h?credential_provider={name}",
                f"credential_provider='{name}' cannot",
            )
            for name in ("..", ".shop.Credentials", "Credentials", "shop.")
        ),
        ("redis://:secret@h?ssl_cert_reqs=none", "rediss://"),
        ("rediss://:secret@h?ssl_min_version=old", "ssl_min_version='old' cannot be used"),
        ("rediss://:secret@h?ssl_cert_reqs=sometimes", "'required', 'optional' or 'none'"),
        ("rediss://:secret@h?ssl_cert_req=none", "ssl_cert_reqs"),
        ("rediss://:secret@h?ssl_ca_certs=/no/such.pem", "No such file"),
        ("unix://run/redis.sock?password=secret", "third slash"),
        ("unix://?password=secret", "third slash"),
        ("unix:///run/redis.sock?ssl_cert_reqs=none&password=secret", "no TLS"),
        ("sentinel://:secret@a:26379;sentinel://:secret@b:26379/0", "Sentinel"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str, says: str) -> None:
    message = refusal(url)

    assert says in message
    assert not any(part in message for part in ("secret", "sec/", "sec#", "sec?", "ret@"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cert_reqs": "none"}, "no TLS option 'cert_reqs'"),
        ({"ssl_certfile": "/no/such.pem", "ssl_keyfile": "/dev/null"}, "No such file"),
        ({"ssl_keyfile": "/dev/null"}, "ssl_keyfile needs its ssl_certfile"),
        ({"ssl_cert_reqs": 7}, "ssl_cert_reqs=7"),
        ("required", "a dict or True, not str"),
    ],
)
def test_tls_options_that_cannot_be_used_are_refused(options: Any, says: str) -> None:
    assert says in refusal("rediss://h", options)


#: What a connection would stumble over: with a bare TypeError, or with what looks like an outage.
UNUSABLE: list[dict[str, Any]] = [
    {"ssl_min_version": "TLSv1_2"},
    {"ssl_min_version": 10**30},
    {"ssl_ciphers": 5},
    {"ssl_ciphers": "nonsense"},
    {"ssl_certfile": 5},
    {"ssl_certfile": "/"},
    {"ssl_certfile": "/dev/null"},
    {"ssl_ca_certs": "/"},
    {"ssl_ca_certs": "/dev/null"},
    {"ssl_ca_path": "/no/such/folder"},
    {"ssl_ca_path": "/dev/null"},
    {"ssl_ca_path": 5},
    {"ssl_ca_data": "no certificate"},
]


@pytest.mark.parametrize("options", UNUSABLE, ids=repr)
def test_what_no_tls_connection_can_be_made_with_is_refused_before_one_is_made(
    options: dict[str, Any],
) -> None:
    name, value = next(iter(options.items()))
    if name not in signature(redis.SSLConnection).parameters:
        pytest.skip("this redis-py does not have it")
    client = redis.Redis("h", ssl=True, **options)
    for place in ("rediss://h", "sentinel://h?master_name=shop", "rediss+cluster://h"):
        assert f"{name}={value!r} cannot be used: " in refusal(place, options)
    with pytest.raises(LockConfigError, match=f"{name}=.* cannot be used: "):
        transport_for_client(client)


@pytest.mark.parametrize("name", ["ssl_include_verify_flags", "ssl_exclude_verify_flags"])
def test_flags_that_are_none_are_refused(name: str) -> None:
    if name not in signature(redis.SSLConnection).parameters:
        pytest.skip("this redis-py does not have it")
    assert f"{name}=['strict'] cannot" in refusal("rediss://h", {name: ["strict"]})
    made_of("rediss://h", {name: [ssl.VERIFY_X509_STRICT]})


def test_a_wrong_password_of_a_key_is_refused_and_not_shown(
    tmp_path: Path, certificate: dict[str, str]
) -> None:
    locked = tmp_path / "locked.pem"
    make = ["openssl", "rsa", "-aes128", "-passout", "pass:right"]
    subprocess.run(
        [*make, "-in", certificate["ssl_keyfile"], "-out", locked], check=True, capture_output=True
    )
    options = {**certificate, "ssl_keyfile": str(locked)}

    made_of("rediss://h", {**options, "ssl_password": "right"})
    for wrong in ("secret", 5):
        said = refusal("rediss://h", {**options, "ssl_password": wrong})
        assert f"ssl_keyfile={str(locked)!r}, ssl_password='***' cannot be used: " in said
        assert "secret" not in said


def test_what_redis_py_takes_is_taken(certificate: dict[str, str]) -> None:
    nothing = {"ssl_certfile": "", "ssl_keyfile": "", "ssl_password": "a"}
    made_of("rediss://h", {**nothing, "ssl_ca_certs": Path(certificate["ssl_ca_certs"])})
    made_of("rediss://h", {"ssl_ca_path": "/etc", "ssl_ca_data": None})
    if "ssl_ciphers" in signature(redis.SSLConnection).parameters:  # not in redis-py 5.0.0
        made_of("rediss://h", {"ssl_ciphers": "", "ssl_min_version": ssl.TLSVersion.TLSv1_2})
        made_of("rediss://h?ssl_min_version=771")


def test_tls_options_for_a_unix_socket_are_refused() -> None:
    assert "no TLS" in refusal("unix:///run/redis.sock", {"ssl_cert_reqs": "none"})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2"),
        ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
        ("redis://user:secret@h/0", "redis://user:***@h/0"),
        ("redis://secret@h/0", "redis://***@h/0"),
        ("redis://u:se@cr:et@h", "redis://u:***@h"),
        ("redis://u:se/cr#e?t@h", "redis://u:***@h"),
        ("u:secret@h", "u:***@h"),
        ("redis://u:secret", "redis://u:***"),
        ("u:secret", "u:***"),
        ("redis://u:sec,ret", "redis://u:***"),
        ("redis+cluster://h1:1,h2:2", "redis+cluster://h1:1,h2:2"),
        ("redis://u:secret/0", "redis://u:***"),
        ("unix:///s?password=se%40cret&db=1", "unix:///s?password=***&db=1"),
        ("unix:///s?db=1&password=se@cret", "unix:///s?db=1&password=***"),
        ("rediss://h?ssl_password=secret", "rediss://h?ssl_password=***"),
        ("redis://:a;b@h;redis://:c@g", "redis://:***@h;redis://:***@g"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert safe_url(url) == shown
