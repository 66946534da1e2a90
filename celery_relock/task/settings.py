"""Settings of the app."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoreSettings:
    url: str
    ssl: Any = None
    namespace: str = "relock"
    source: str = ""


def store_settings(app: Any) -> StoreSettings:
    conf = app.conf
    url = conf.get("relock_url") or conf.result_backend or conf.broker_url
    return StoreSettings(url, None, conf.get("relock_namespace", "relock"))


def option_defaults(app: Any) -> dict[str, object]:
    return {}
