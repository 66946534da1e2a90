"""The list of connections: an answer goes to who asked, whatever strikes; its bounds hold."""

from __future__ import annotations

import _thread
import hashlib
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_relock.backends.redis import connections
from celery_relock.backends.redis.backend import RedisBackend
from celery_relock.backends.redis.connections import MOST_IDLE, Connections, Effort
from celery_relock.backends.redis.errors import translate
from celery_relock.backends.redis.scripts import Script
from celery_relock.backends.redis.urls import transport_for_client, transport_for_url
from celery_relock.errors import LockConfigError, LockUnavailable, RelockError
from tests.support import RedisServer, wait_for
from tests.support.backends import backend_of, close
from tests.support.permissions import everything
from tests.support.proxy import Proxy


def script_of(source: str) -> Script:
    return Script("echo", source, hashlib.sha1(source.encode()).hexdigest(), False)


# Answers what it was asked, and takes its time, so that most signals strike while one waits.
ECHO = script_of("for i = 1, 20000 do end redis.call('INCR', KEYS[1]) return ARGV[1]")


class Struck(Exception):
    """By a signal, as a soft time limit's."""


def list_of(url: str, **options: Any) -> Connections:
    made: Any = transport_for_url(url)
    more = {name: options.pop(name) for name in ("credential_provider",) if name in options}
    return Connections(made.at("")._kind, {**made.at("")._options, **more}, **options)


def idle_in(links: Connections) -> int:
    return len(links._idle)


# Some strike in a destructor, from where no exception comes out.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fresh", [False, True], ids=["kept", "each time a new connection"])
def test_an_answer_never_goes_to_another_call_whenever_a_signal_raises(
    redis_url: str, namespace: str, fresh: bool
) -> None:
    """A pool or a client of redis-py hands the rest of an answer to whoever asks next."""
    server, key = transport_for_url(f"{redis_url[:-1]}3"), f"{namespace}:count"
    chance, struck, answered, armed = random.Random(7), 0, 0, False

    # Another thread may have caught the signal, so that it strikes here after the timer's end.
    def strike(*_: object) -> None:
        if armed:
            raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    began, number = time.monotonic(), 0
    try:
        while time.monotonic() < began + 4.0 or min(struck / 5, answered) <= 20:
            assert time.monotonic() < began + 60.0, (struck, answered)
            number += 1
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00005, 0.0012))
                armed = True
                try:
                    if fresh:
                        close(server)
                    reply, repeated, _ = server.run(ECHO, [key], [str(number)])
                finally:
                    armed = False
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Exception as error:
                # redis-py 5's constructor makes another error of it (in a `finally`).
                if not isinstance(error, Struck) and not isinstance(error.__context__, Struck):
                    raise
                struck += 1
            else:
                answered += 1
                assert reply == [str(number).encode()]
                assert not repeated
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with redis.Redis.from_url(f"{redis_url[:-1]}3") as right, redis.Redis.from_url(redis_url) as no:
        assert int(right.get(key) or 0) >= answered
        assert not no.exists(key), "a command went to the wrong database"


def test_so_many_are_kept_while_nobody_uses_them(redis_url: str) -> None:
    links = list_of(f"{redis_url}?client_name=bound")
    threads = [
        threading.Thread(target=lambda: links.exchange([("BLPOP", "never", "0.3")], Effort()))
        for _ in range(3 * MOST_IDLE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with redis.Redis.from_url(redis_url, protocol=2) as admin:

        def connected() -> int:
            return sum(each["name"] == "bound" for each in admin.client_list())

        wait_for(lambda: connected() == MOST_IDLE, what="the others to be closed")
    assert idle_in(links) == MOST_IDLE
    links.close()


def test_those_that_were_idle_for_long_are_closed_and_not_used_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = list_of(redis_url)
    taken = [links._take(None)[0] for _ in range(3)]
    for link in taken:
        link.connect()
        links._keep(link, True, None)
    monkeypatch.setattr(connections, "IDLE_FOR", 0.2)
    time.sleep(0.3)
    assert idle_in(links) == 3
    links.exchange([("PING",)], Effort())
    assert idle_in(links) == 1
    assert links._take(None)[0] not in taken


def test_a_connection_that_the_server_closed_is_replaced_unnoticed(redis_url: str) -> None:
    links, effort = list_of(f"{redis_url}?client_name=doomed"), Effort()
    links.exchange([("PING",)], effort)
    with redis.Redis.from_url(redis_url, protocol=2) as admin:
        for each in admin.client_list():
            if each["name"] == "doomed":
                admin.client_kill_filter(_id=each["id"])
    time.sleep(1.1)  # from then on it is looked at before it is used
    assert links.exchange([("ECHO", "a")], effort) == [b"a"]
    assert effort.unheard == 0, "it was not sent to the one that was closed"


@pytest.mark.parametrize(
    ("kept", "limit", "within"),
    [
        pytest.param(True, 30.0, 0.3, id="kept"),
        pytest.param(False, 30.0, 0.3, id="new"),
        pytest.param(True, 1.0, 3.0, id="kept and longer"),
        pytest.param(False, 1.0, 30.0, id="new and longer"),
    ],
)
def test_a_frozen_server_keeps_the_keep_alive_thread_no_longer_than_said(
    own_redis: Callable[..., RedisServer], kept: bool, limit: float, within: float
) -> None:
    server = own_redis()
    links = list_of(server.url, limit=limit)
    if kept:
        links.exchange([("PING",)], Effort(within))
    server.pause()
    try:
        started = time.monotonic()
        with pytest.raises(redis.TimeoutError):
            links.exchange([("PING",)], Effort(within))
        # A new connection has a limit of its own, whatever is asked for.
        said = within if kept else min(within, limit)
        assert said * 0.8 < time.monotonic() - started < said + 10
    finally:
        server.resume()


class Tokens(redis.CredentialProvider):
    """A service that takes its time, at first."""

    def __init__(self) -> None:
        self.hangs, self.asked = threading.Event(), 0

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        self.hangs.wait(30)
        return "default", ""


@pytest.fixture
def tokens(own_redis: Callable[..., RedisServer]) -> Iterator[tuple[Tokens, Connections]]:
    """Connections of the keep-alive thread to a server that needs a token."""
    server, service = own_redis(), Tokens()
    server.client().acl_setuser("default", enabled=True, nopass=True)
    yield service, list_of(server.url, limit=1.0, credential_provider=service)
    service.hangs.set()


def test_a_login_that_hangs_costs_its_bound_and_what_comes_late_is_used(
    tokens: tuple[Tokens, Connections],
) -> None:
    service, links = tokens
    started = time.monotonic()
    for most in (1.0, 1.1, 1.2):  # the first alone waits
        with pytest.raises(redis.TimeoutError) as raised:
            links.exchange([("PING",)], Effort(0.3))
        assert time.monotonic() - started < most
    said = translate(raised.value).reason
    assert re.search(r"\(127.0.0.1:\d+: no connection in time: .* login hangs\)", said)
    assert service.asked == 1
    service.hangs.set()
    wait_for(lambda: idle_in(links) == 1, what="the connection")
    assert links.exchange([("PING",)], Effort(5)) == [b"PONG"]
    assert service.asked == 1


def test_who_is_struck_while_a_login_hangs_leaves_its_connection_to_the_next(
    tokens: tuple[Tokens, Connections],
) -> None:
    service, links = tokens

    def strike(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Struck):
            links.exchange([("PING",)], Effort(5))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    service.hangs.set()
    wait_for(lambda: idle_in(links) == 1, what="the connection")
    assert links.exchange([("PING",)], Effort(5)) == [b"PONG"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, on purpose
def test_a_forked_child_does_not_wait_for_a_login_that_hangs_in_its_parent(
    tokens: tuple[Tokens, Connections],
) -> None:
    service, links = tokens
    with pytest.raises(redis.TimeoutError):
        links.exchange([("PING",)], Effort(0.2))
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        service.hangs = threading.Event()
        service.hangs.set()
        os._exit(7 if links.exchange([("PING",)], Effort(5)) == [b"PONG"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_without_a_thread_for_it_the_keep_alive_thread_connects_itself(
    tokens: tuple[Tokens, Connections], monkeypatch: pytest.MonkeyPatch
) -> None:
    service, links = tokens

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    service.hangs.set()
    assert links.exchange([("PING",)], Effort(5)) == [b"PONG"]
    assert not links._hangs.locked()


def test_a_command_over_a_connection_that_a_thread_has_opened_is_not_sent_again(
    redis_server: RedisServer,
) -> None:
    """It is new, and not stale. A server that ends all of them would be asked for ever."""
    with Proxy(redis_server.port) as proxy:
        links = list_of(proxy.url, limit=1.0)
        proxy.lose_command(of="PING")
        with pytest.raises(redis.ConnectionError):
            links.exchange([("PING",)], Effort())
        assert links.exchange([("PING",)], Effort()) == [b"PONG"]
        links.close()


@pytest.mark.parametrize("fresh", [1.0, 0.0], ids=["just used", "idle"])
def test_a_server_that_hangs_is_waited_for_once_and_the_next_caller_waits_for_a_moment(
    own_redis: Callable[..., RedisServer],
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    fresh: float,
) -> None:
    monkeypatch.setattr(connections, "FRESH", fresh)
    server = own_redis()
    backend = backend_of(server.url, namespace, socket_timeout=3)
    backend.inspect("a")
    server.pause()
    try:
        for most in (5.5, 2.5):
            started = time.monotonic()
            with pytest.raises(LockUnavailable):
                backend.inspect("a")
            assert time.monotonic() - started < most
    finally:
        server.resume()
    time.sleep(1.1)
    assert backend.inspect("a").waiting == 0


@pytest.mark.parametrize(("fault", "executed"), [("lose_reply", 2), ("lose_command", 1)])
def test_how_often_a_command_may_have_been_executed_is_known(
    redis_server: RedisServer, redis_url: str, namespace: str, fault: str, executed: int
) -> None:
    with Proxy(redis_server.port) as proxy:
        server, key = transport_for_url(proxy.url), f"{namespace}:count"
        assert server.run(ECHO, [key], ["1"])[:2] == ([b"1"], False)
        getattr(proxy, fault)(of="EVALSHA")
        assert server.run(ECHO, [key], ["2"])[:2] == ([b"2"], True)
        with redis.Redis.from_url(redis_url) as client:
            assert int(client.get(key)) == 1 + executed
        close(server)


def test_nothing_is_sent_and_nothing_counted_where_nobody_answers() -> None:
    links, effort = list_of("redis://127.0.0.1:1"), Effort()
    with pytest.raises(redis.ConnectionError):
        links.exchange([("PING",)], effort)
    assert effort.unheard == 0


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [("maxclients", "1", LockUnavailable), ("requirepass", "secret", LockConfigError)],
)
def test_what_a_server_has_refused_was_not_executed(
    own_redis: Callable[..., RedisServer], setting: str, value: str, error: type[RelockError]
) -> None:
    """redis-py takes some of its answers for the end of the connection."""
    server = own_redis()
    # Without a name: nothing is sent before the command.
    backend = RedisBackend(transport_for_client(redis.Redis(port=server.port)), "ns")
    backend.force_release("a")
    close(backend.transport)
    client = server.client()
    client.config_set(setting, value)
    with pytest.raises(error) as told:
        backend.force_release("a")
    assert "is not known" not in str(told.value)
    links, effort = backend.transport.at(""), Effort()
    with pytest.raises(redis.ConnectionError):
        links.exchange([("PING",)], effort)
    assert effort.unheard == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_uses_none_of_its_parents_connections(redis_url: str) -> None:
    links = list_of(redis_url)
    (mine,) = links.exchange([("CLIENT", "ID")], Effort())
    child = os.fork()
    if child == 0:
        (own,) = links.exchange([("CLIENT", "ID")], Effort())
        os._exit(7 if own != mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert links.exchange([("CLIENT", "ID")], Effort()) == [mine], (
        "the child has closed its parent's"
    )


def test_no_number_is_given_to_be_packed(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hiredis calls a number's repr while it packs, and crashes when a signal strikes in that."""
    packed: list[Any] = []
    pack = redis.Connection.pack_commands

    def look(self: Any, commands: Any) -> Any:
        packed.extend(commands)
        return pack(self, commands)

    monkeypatch.setattr(redis.Connection, "pack_commands", look)
    backend = backend_of(f"{redis_url[:-1]}2", namespace, replicas=connections.Replicas(0))
    everything(backend)
    assert backend.examination().servers(0)
    assert len(packed) > 20
    assert {type(word) for command in packed for word in command} <= {str, bytes}


def test_no_password_can_be_read_in_what_is_shown(own_redis: Callable[..., RedisServer]) -> None:
    server = own_redis(password="s3cret")
    backend = backend_of(server.url, "ns")
    backend.inspect("a")
    shown = [backend, backend.transport, backend.transport.at(""), backend.id]
    server.kill()
    with pytest.raises(LockUnavailable) as caught:
        backend.inspect("a")
    text = " ".join(map(repr, [*shown, caught.value, caught.value.__cause__]))
    assert "s3cret" not in f"{text} {backend.transport.fingerprint} {caught.value}"
