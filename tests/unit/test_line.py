"""What a subscriber is sent, in RESP 2 and 3."""

from __future__ import annotations

import pytest
import redis

from celery_relock.store.line import _parse, _Short

MESSAGE = b"3\r\n$7\r\nmessage\r\n$2\r\nin\r\n$13\r\ngranted r n 7\r\n"


@pytest.mark.parametrize("data", [b"*" + MESSAGE, b">" + MESSAGE], ids=["RESP 2", "RESP 3"])
def test_a_message_is_read_as_soon_as_all_of_it_is_there(data: bytes) -> None:
    for cut in range(len(data)):
        with pytest.raises(_Short):
            _parse(data[:cut], 0)
    assert _parse(data + b"*1\r\n", 0) == ([b"message", b"in", b"granted r n 7"], len(data))


def test_answers_to_a_subscription_and_to_a_ping_are_read() -> None:
    assert _parse(b"*3\r\n$9\r\nsubscribe\r\n$2\r\nin\r\n:1\r\n", 0)[0] == [
        b"subscribe",
        b"in",
        b"1",
    ]
    assert _parse(b"*2\r\n$4\r\npong\r\n$0\r\n\r\n", 0)[0] == [b"pong", b""]
    assert _parse(b"+PONG\r\n", 0)[0] == b"PONG"


def test_an_error_of_the_server_is_raised() -> None:
    with pytest.raises(redis.ResponseError, match="NOPERM no access"):
        _parse(b"-NOPERM no access\r\n", 0)


def test_what_is_no_answer_of_redis_ends_the_connection() -> None:
    with pytest.raises(redis.ConnectionError, match="HTTP"):
        _parse(b"HTTP/1.1 400\r\n", 0)
