"""Lock names to Redis keys: the one place that builds a key. `lua/README.md` has them all."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache

from ..errors import LockConfigError

SCHEMA = 2
# Longer names are cut and a digest of the whole is put behind. What is cut is longer than any name
# that is kept, so the two kinds cannot meet.
_LONGEST, _CUT = 120, 104
_NAMESPACE = re.compile(r"[^\s{}\x00-\x1f]{1,60}")


class Keyspace:
    """The keys of one namespace.

    All keys of a bucket share a hash tag, so one script call stays in one slot of a cluster; the
    tag comes before the name, so braces in a name mean nothing.

    Raises:
        LockConfigError: the namespace is empty, too long, or has spaces or braces.
    """

    def __init__(self, namespace: str, buckets: int = 1) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise LockConfigError(
                f"relock_namespace={namespace!r}: use 1 to 60 characters without spaces or braces"
            )
        self.namespace = namespace
        self.buckets = buckets
        self._fixed = lru_cache(maxsize=1024)(self._keys_of)

    def bucket(self, name: str) -> int:
        """The bucket that all keys of a lock are in."""
        if self.buckets == 1:
            return 0
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.buckets

    def prefix(self, bucket: int) -> str:
        return f"{self.namespace}:{{{bucket}}}:"

    def meta(self, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}meta"

    def inbox(self, process: str, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}i:{process}"

    def lock(self, name: str) -> str:
        return f"{self.prefix(self.bucket(name))}l:{_stored(name)}"

    def queue(self, name: str) -> str:
        return f"{self.prefix(self.bucket(name))}q:{_stored(name)}"

    def waiters(self, name: str) -> str:
        return f"{self.prefix(self.bucket(name))}w:{_stored(name)}"

    def due(self, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}due"

    def absent(self, bucket: int) -> str:
        """A key that never exists."""
        return f"{self.prefix(bucket)}-"

    def tombstone(self, execution_id: str, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}d:{execution_id}"

    def claim(self, names: Sequence[str], execution_id: str) -> list[str]:
        """The keys of `acquire` and `release`: meta, tombstone and each lock."""
        meta, ended, locks = self._fixed(tuple(names))
        return [meta, ended + execution_id, *locks]

    def _keys_of(self, names: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
        prefix = self.prefix(self.bucket(names[0]))
        return f"{prefix}meta", f"{prefix}d:", tuple(f"{prefix}l:{_stored(n)}" for n in names)


def _stored(name: str) -> str:
    if len(name) <= _LONGEST // 4:
        return name  # four bytes a character at the most
    encoded = name.encode()
    if len(encoded) <= _LONGEST:
        return name
    digest = base64.urlsafe_b64encode(hashlib.blake2b(encoded, digest_size=16).digest())
    return encoded[:_CUT].decode(errors="ignore") + "~" + digest.decode().rstrip("=")
