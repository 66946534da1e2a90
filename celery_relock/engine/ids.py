"""Short ids: records with ids of 22 bytes keep Redis's compact encoding, ids of 36 may not."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import uuid

#: For pauses and the like: the program's own `random`, and its seed, are left alone.
chance = random.SystemRandom()

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OF_16_BYTES = re.compile(r"[A-Za-z0-9_-]{21}[AQgw]")
# Not "-", which to the scripts is nobody.
_SHORT_ALREADY = re.compile(r"(?!-\Z)[A-Za-z0-9_.:-]{1,22}")


def new_id() -> str:
    """A random 128-bit id as 22 characters of url-safe base64."""
    # The kernel's randomness, never a generator of this process: children of a fork would
    # draw the same ids.
    return base64_text(os.urandom(16))


def new_attempt_id() -> str:
    """6 random bytes as 8 characters of url-safe base64."""
    return base64_text(os.urandom(6))


def short(text: str) -> str:
    """An id of any form as at most 22 bytes without spaces; the same text gives the same id.

    The text of a UUID (lower case, as Celery writes its ids) becomes the base64 of its 16 bytes.
    Another text that is short and plain already is kept, so that an id of `new_id`, or a result of
    this function, comes back unchanged. Everything else becomes a digest of 128 bits. Two texts
    share a result only if they share a digest, or if one is the base64 of the other.
    """
    if _UUID.fullmatch(text):
        return base64_text(bytes.fromhex(text.replace("-", "")))
    if _SHORT_ALREADY.fullmatch(text):
        return text
    return digest(text.encode("utf-8", "surrogatepass"))


def full(text: str) -> str:
    """The UUID that `short` made an id from, to be searched and pasted: `short(full(x)) == x`. An
    id that was not made from 16 bytes is returned as it is."""
    if not _OF_16_BYTES.fullmatch(text):
        return text
    return str(uuid.UUID(bytes=base64.urlsafe_b64decode(text + "==")))


def digest(data: bytes) -> str:
    """128 bits of BLAKE2b as 22 characters of url-safe base64."""
    return base64_text(hashlib.blake2b(data, digest_size=16).digest())


def base64_text(data: bytes) -> str:
    """Url-safe base64 (RFC 4648, section 5) without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
