"""Lock names to Redis keys. `lua/README.md` has them all; scripts make those of one lock from
another's, and `inspection.py` and `examination.py` look for keys by patterns."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ...engine import ids
from ...engine.protocol import LINE, MARKER
from ...errors import LockConfigError

_T = TypeVar("_T")

SCHEMA = 2
# More than there will be masters, and few enough for a look at all of them.
CLUSTER_BUCKETS = 64
# In bytes. A name longer than _LONGEST is cut to _CUT and gets a digest of the whole name. The
# result is longer than _LONGEST, so it cannot be equal to another lock's name.
_LONGEST, _CUT = 120, 104
_NAMESPACE = re.compile(r"[^\s{}\x00-\x1f]{1,60}")
# A hash tag, as Redis finds it in a key: between the first brace and the next closing brace, if not
# empty.
_TAG = re.compile(r"[^{]*\{([^}]+)\}")


class Keys:
    """The keys of one namespace.

    All keys of a bucket share a hash tag, so one script call stays in one slot of a cluster. A
    server has one bucket. In a cluster a name's own `{tag}`, or else the whole name, chooses the
    bucket.

    Raises:
        LockConfigError: the namespace is empty, too long, or has spaces or braces.
    """

    def __init__(self, namespace: str, buckets: int = 1) -> None:
        given: object = namespace
        if not isinstance(given, str) or not _NAMESPACE.fullmatch(given):
            raise LockConfigError(
                f"the namespace of locks (relock_namespace) cannot be {namespace!r:.100}: use 1 to "
                "60 characters without spaces or braces"
            )
        self.namespace = namespace
        self.buckets = buckets
        self.every_bucket = range(buckets)
        self._prefixes = [f"{namespace}:{{{bucket}}}:" for bucket in self.every_bucket]

    def bucket(self, name: str) -> int:
        """The bucket of a lock's keys, of its line and of its calls' dedup markers: they must be in
        one bucket, because each bucket has its own memory of ended executions."""
        if self.buckets == 1:
            return 0
        if name.startswith(MARKER):  # a marker's name has its task, and its locks of one bucket
            name = name.split("\t", 2)[-1].partition("\t")[0]
        name = name.removeprefix(LINE)
        tag = _TAG.match(name)
        digest = hashlib.blake2b((tag[1] if tag else name).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.buckets

    def prefix(self, bucket: int) -> str:
        return self._prefixes[bucket]

    def meta(self, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}meta"

    def inbox(self, process: str, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}i:{process}"

    def lock(self, name: str) -> str:
        return self.of_lock("l", name)

    def due(self, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}due"

    def parked(self, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}parked"

    def sent(self, task: str, bucket: int) -> str:
        return f"{self.prefix(bucket)}sent:#{task}"

    def message(self, name: str, bucket: int) -> str:
        """The key of the messages parked for a lock, by the lock's name as it is stored."""
        return f"{self.prefix(bucket)}m:{name}"

    def live(self, channel: str) -> str:
        return f"{self.prefix(0)}live:{channel}"

    def tombstone(self, execution_id: str, bucket: int = 0) -> str:
        return f"{self.prefix(bucket)}d:{execution_id}"

    def claim(self, names: Sequence[str], execution_id: str) -> list[str]:
        """The keys of a claim: meta, tombstone and each lock.

        Raises:
            LockConfigError: in a cluster, the names are not all in one bucket.
        """
        bucket = self.bucket(names[0])
        if len(names) > 1 and any(self.bucket(name) != bucket for name in names):
            raise LockConfigError(
                f"in a Redis Cluster the locks {', '.join(map(repr, names))} of one task are "
                "in different slots and cannot be acquired together: give their names a shared "
                'hash tag, as in "order:{{{id}}}:stock" and "order:{{{id}}}:invoice"'
            )
        prefix = self._prefixes[bucket]
        keys = [f"{prefix}meta", f"{prefix}d:{execution_id}"]
        for name in names:
            keys.append(f"{prefix}l:{_stored(name)}")
        return keys

    def other_layout(self, schema: str, buckets: str) -> LockConfigError:
        """The error for a namespace in which another version keeps its locks, or one that takes
        the same servers for a cluster, or for none."""
        do = "use the version of celery-relock that its workers have"
        if schema == str(SCHEMA):
            do = "give all processes the same relock_url, in a Redis Cluster redis+cluster://…"
        return LockConfigError(
            f"relock_namespace={self.namespace!r} holds locks of another layout (schema {schema}, "
            f"{buckets} buckets; this is schema {SCHEMA}, {self.buckets} buckets): {do}, or give "
            "this one a namespace of its own"
        )

    @staticmethod
    def is_shortened(name: str) -> bool:
        """Whether a name looks like the stored form of a long name."""
        size = len(name.encode())
        return _LONGEST < size <= _CUT + 23 and name[-23:-22] == "~"

    def of_lock(self, kind: str, name: str) -> str:
        """A key of a lock, by the letter of its kind (`lua/README.md`)."""
        return f"{self.prefix(self.bucket(name))}{kind}:{_stored(name)}"


def bucket_of(key: str) -> int:
    """The bucket of a key. A namespace has no braces, so the first braces are the bucket's."""
    start = key.index("{") + 1
    return int(key[start : key.index("}", start)])


def in_parts(items: Iterable[_T], bucket: Callable[[_T], int], most: int) -> list[list[_T]]:
    """The items for each call of a script: of one bucket, so many at most."""
    of_bucket: dict[int, list[_T]] = {}
    for item in items:
        of_bucket.setdefault(bucket(item), []).append(item)
    return [x[i : i + most] for x in of_bucket.values() for i in range(0, len(x), most)]


def absent(key: str) -> str:
    """A key that never exists, in the bucket of this one."""
    return key[: key.index("}") + 2] + "-"


def _stored(name: str) -> str:
    if len(name) <= _LONGEST // 4:
        return name  # a character has four bytes at most
    encoded = name.encode()
    if len(encoded) <= _LONGEST:
        return name
    return f"{encoded[:_CUT].decode(errors='ignore')}~{ids.digest(encoded)}"
