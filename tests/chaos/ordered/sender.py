"""One sender: `python -m tests.chaos.ordered.sender <journal> <calls> <keys> <seed>`.

It writes into its journal when it begins to send a call and when it has sent it, by the clock that
all processes of the machine share, and goes on where one that was killed has stopped.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from pathlib import Path

from tests.chaos.ordered.app import app, lets_pass, update

# Between two calls, in seconds: about as fast as the workers are.
PAUSE = 0.08
# Of so many calls the first attempt asks for a retry.
RETRIED = 0.1


def main() -> None:
    path, calls, keys, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    begun = path.read_text().count("sending") if path.exists() else 0
    chance = random.Random(seed + begun)
    with path.open("a", buffering=1) as journal, app.pool.acquire():
        for _ in range(calls - begun):
            call, key = str(uuid.uuid4()), f"account:{chance.randrange(keys)}"
            task, retried = chance.choice((update, lets_pass)), chance.random() < RETRIED
            journal.write(f"sending {call} {key} {time.monotonic_ns()}\n")
            task.apply_async((key, retried), task_id=call)
            journal.write(f"sent {call} {key} {time.monotonic_ns()}\n")
            time.sleep(random.uniform(0, PAUSE))


if __name__ == "__main__":
    main()
