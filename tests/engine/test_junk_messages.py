"""Whatever is published to an inbox raises out of nothing and ends no subscription (B10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import wait_for
from tests.support.runs import Runs

JUNK = [
    b"x",
    b"granted",
    b"granted a b c",
    b"granted a b \xff",
    b"\xff\xfe\x00",
    "granted a b ²".encode(),
    b"granted a b " + b"9" * 5000,
    b"lost",
    b"lost a",
    b"  ",
    b"granted  ",
    b"\r\n\r\n$5\r\n",
    b"x" * 100_000,
]


# What a script publishes is words with spaces between them: such words in any order, and bytes.
WORDS = st.sampled_from(["granted", "lost", "parked", "RUN", "a", "-1", "1e3", "0x1", "", "\t"])
MESSAGES = st.one_of(
    st.binary(max_size=100),
    st.lists(st.one_of(WORDS, st.text(max_size=5)), max_size=6).map(" ".join),
)


def channels(client: redis.Redis, namespace: str) -> list[bytes]:
    return client.pubsub_channels(f"{namespace}:*:i:*")


@pytest.mark.parametrize("waiters", [1, 2], ids=["one waiter", "two waiters"])
def test_junk_on_the_channel_does_not_reach_who_waits(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str, waiters: int
) -> None:
    one, two = runs(), runs()
    first = one.held("a")
    in_line = [two.waiting(two.lease("a")) for _ in range(waiters)]
    wait_for(lambda: len(channels(client, namespace)) == 2, what="the holder's inbox as well")
    before = sorted(channels(client, namespace))
    head = in_line[0].lease.claim
    run, attempt = head.execution_id, head.attempt_id
    forged = [f"granted {run} {attempt} x".encode(), f"granted {run}".encode()]
    for channel in before:
        for text in JUNK + forged:
            client.publish(channel, text)
    assert all(each.is_alive() for each in in_line)
    assert sorted(channels(client, namespace)) == before, "the subscriptions go on"
    one.release(first)
    for each in in_line:
        two.release(each.entered())


def test_no_message_at_random_reaches_who_waits_or_holds(
    runs: Callable[..., Runs], client: redis.Redis, namespace: str
) -> None:
    one, two = runs(), runs()
    first, other = one.held("a"), two.held("b", lease=60.0)
    lease = two.lease("a")
    waiter = two.waiting(lease)
    wait_for(lambda: len(channels(client, namespace)) == 2, what="the holder's inbox as well")
    before = sorted(channels(client, namespace))

    @settings(max_examples=300, deadline=None, database=None)
    @given(MESSAGES)
    def publish(message: bytes | str) -> None:
        if isinstance(message, str):
            message = message.replace("RUN", lease.claim.execution_id)
            message = message.encode("utf-8", "surrogatepass")
        for channel in before:
            client.publish(channel, message)

    publish()
    assert waiter.is_alive()
    assert sorted(channels(client, namespace)) == before, "the subscription goes on"
    one.release(first)
    waiter.entered()
    assert not other.lost
    two.release(lease)
    assert two.release(other)
