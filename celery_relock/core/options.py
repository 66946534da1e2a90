"""The options of a locked task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LockOptions:
    key: Any = None
    owner: Any = "root"
    reentrant: str = "inline"
    limit: int | Callable[..., int] = 1
    ttl: float = 30.0
    on_conflict: str = "retry"
    max_wait: float | None = None
    on_lost: str = "flag"
    on_unavailable: str = "raise"

    @classmethod
    def collect(
        cls, declared: Mapping[str, object], defaults: Mapping[str, object], where: str
    ) -> LockOptions:
        return cls(**{**defaults, **{k.removeprefix("lock_"): v for k, v in declared.items()}})

    @property
    def patience(self) -> float:
        return 60.0 if self.max_wait is None else self.max_wait

    def limit_for(self, arguments: Mapping[str, object]) -> int:
        return self.limit if isinstance(self.limit, int) else self.limit(**arguments)
