"""The resource that the locks protect: a register that is read, thought about, and written.

It is on a server of its own that nothing happens to, and comes in three forms, so that one run says
what each protection is worth: `blind` takes every write, `checked` takes the writes whose writer
asked its lock for a loss first, `fenced` refuses whoever comes with a fence lower than one that it
has seen, at the read (the first contact) as well as at the write.
"""

from __future__ import annotations

import redis

from tests.chaos.checker import Write

KINDS = ("blind", "checked", "fenced")

# A refused reader must go away: a value read late and written in time would lose an update too.
_TOUCH = """
local fence = tonumber(ARGV[1])
if fence > 0 then
  if fence < tonumber(redis.call('HGET', KEYS[1], 'fence') or 0) then
    return false
  end
  redis.call('HSET', KEYS[1], 'fence', ARGV[1])
end
"""
_READ = _TOUCH + "return redis.call('HGET', KEYS[1], 'value') or ''"
_WRITE = (
    _TOUCH
    + """
redis.call('HSET', KEYS[1], 'value', ARGV[3])
redis.call('RPUSH', KEYS[1] .. ':log', ARGV[2] .. ' ' .. ARGV[3])
return 'OK'
"""
)


class Register:
    """One register for each kind and lock. `fence` 0 is not compared."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True)
        self._read = self._client.register_script(_READ)
        self._write = self._client.register_script(_WRITE)

    def read(self, kind: str, lock: str, fence: int) -> str | None:
        """The value, or None: refused."""
        value = self._read(keys=[f"{kind}:{lock}"], args=[fence if kind == "fenced" else 0])
        return None if value is None else str(value)

    def write(self, kind: str, lock: str, fence: int, read: str, value: str) -> bool:
        """False: refused."""
        args = [fence if kind == "fenced" else 0, read or "-", value]
        return self._write(keys=[f"{kind}:{lock}"], args=args) is not None

    def log(self, kind: str, lock: str) -> list[Write]:
        """All writes in the order in which the register took them. "-" is the empty register."""
        lines: list[str] = self._client.lrange(f"{kind}:{lock}:log", 0, -1)  # type: ignore[assignment]
        return [Write(*line.split(" ")) for line in lines]

    def count(self, kind: str, lock: str) -> int:
        """How many writes it has taken."""
        return int(self._client.llen(f"{kind}:{lock}:log"))  # type: ignore[arg-type]

    def close(self) -> None:
        self._client.close()
