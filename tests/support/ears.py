"""Many channels of a namespace, heard by one."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.desk import Desk, heard_by


class Ears:
    """Hears of some channels, in one order, and can be deaf to one of them."""

    def __init__(self, desk: Desk, channels: Iterable[str]):
        self._inbox = desk.keys.inbox
        self._listener = desk.client.pubsub()
        self.channels = set(channels)
        self._listener.subscribe(*map(self._inbox, channels))
        self.heard()

    def turn(self, channel: str) -> None:
        """Hear this one no longer, or again; returns when the server knows."""
        change = self._listener.unsubscribe, self._listener.subscribe
        change[channel not in self.channels](self._inbox(channel))
        self.channels ^= {channel}
        self.heard()

    def heard(self) -> list[tuple[str, list[str]]]:
        """Channel and words of all messages since the last call."""
        return [
            (each["channel"].decode().rpartition(":")[2], each["data"].decode().split(" "))
            for each in heard_by(self._listener)
        ]

    def close(self) -> None:
        self._listener.close()
