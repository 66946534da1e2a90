#!/usr/bin/env python3
"""Put back faults that a reader found in an earlier version, and check that the tests find them.

    python scripts/faults_back.py             all faults
    python scripts/faults_back.py --only B5   the faults with this text in their name

The tests are the property test and a campaign of faults, which were green with these faults once.
Each fault is put into a copy of the tree, and its test must fail there. Ends with status 1 if a
test passes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from mutate import copy_tree, run_suite

PROPERTY, CAMPAIGN = "tests/property", "tests/chaos/test_chaos.py"


class Edit(NamedTuple):
    """Replace `old`, which is in `file` exactly once, with `new`."""

    file: str
    old: str
    new: str


#: By name: the test that finds the fault, and the edits that put it back.
FAULTS: dict[str, tuple[str, tuple[Edit, ...]]] = {
    "B1: acquire returns True for a lock that is lost already": (
        CAMPAIGN,
        (
            Edit(
                "celery_relock/engine/lease.py",
                "        if now >= self.deadline:\n            return False\n"
                "        self.held_since",
                "        self.held_since",
            ),
            Edit(
                "celery_relock/engine/engine.py",
                "held = lease.state is State.HELD and time.monotonic() < lease.deadline",
                "held = lease.state is State.HELD",
            ),
        ),
    ),
    "B2: who waited has what is left of a waiter's lease": (
        PROPERTY,
        (
            Edit(
                "lua/lib/turns.lua",
                "expiry = call.now + lease,\n      fence = fences[i],",
                "expiry = waiter.parked and call.now + lease or waiter.expiry,\n"
                "      fence = fences[i],",
            ),
        ),
    ),
    "B3: a holder does not hear of a forced release": (
        PROPERTY,
        (
            Edit(
                "lua/force_release.lua",
                "  publish(inbox, table.concat({ 'lost', execution, hold.attempt }, ' '))\n",
                "  local _ = inbox\n",
            ),
        ),
    ),
    "B5: a foreign key fails the heartbeats of all waiters in its batch": (
        PROPERTY,
        (
            Edit(
                "lua/heartbeat.lua",
                "if not beat.failed and not pcall(step, beat) then",
                "if step(beat) then",
            ),
        ),
    ),
    "B5: a foreign key fails the renewals of its batch": (
        PROPERTY,
        (
            Edit(
                "lua/renew.lua",
                "local fine, renewed, expiry = pcall(renew, key, execution, attempt, lease, "
                "longer == '1')",
                "local fine, renewed, expiry = true, renew(key, execution, attempt, lease, "
                "longer == '1')",
            ),
        ),
    ),
    "B9: without memory a release with a waiter fails": (
        PROPERTY,
        (
            Edit(
                "lua/release.lua",
                "Base.write_without_memory(prefix)\n",
                "redis.call('HSET', meta, 'last', execution)\n",
            ),
        ),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the fault's name")
    only = parser.parse_args().only
    unseen = 0
    with tempfile.TemporaryDirectory(prefix="relock-faults-") as temporary:
        for number, (name, (machine, edits)) in enumerate(FAULTS.items()):
            if only not in name:
                continue
            where = copy_tree(Path(temporary) / str(number))
            for edit in edits:
                path = where / edit.file
                text = path.read_text("utf-8")
                if text.count(edit.old) != 1:
                    raise SystemExit(f"{name}: {edit.file} has no, or more than one, {edit.old!r}")
                path.write_text(text.replace(edit.old, edit.new), "utf-8")
            # What a campaign of ten seconds meets is chance.
            tries = 3 if machine == CAMPAIGN else 1
            red = next(filter(None, (run_suite(machine, where) for _ in range(tries))), "")
            unseen += not red
            print(f"{'found' if red else 'NOT FOUND'}  {name}: {machine} {red}", flush=True)
    return min(unseen, 1)


if __name__ == "__main__":
    sys.exit(main())
