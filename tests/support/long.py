"""The long form of the suite: `RELOCK_LONG=1 make test`."""

from __future__ import annotations

import os

LONG = os.environ.get("RELOCK_LONG", "") not in ("", "0")
