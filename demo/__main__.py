"""The demo: `python -m demo` from the repository's root starts a Redis and a worker of its own;
`python -m demo redis://…` uses that Redis and the workers of `demo.tasks` that are on it.

Ends with status 1 if something that it says does not happen.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import NamedTuple, NoReturn

from demo.screen import Screen
from demo.servers import Given, Servers


class Step(NamedTuple):
    """A method of `Steps`, its headline, what it is about, and what to look at."""

    method: str
    title: str
    about: str
    look: str


# Seconds to read what to look at before a step begins.
PAUSE = 2.5

STEPS = (
    Step(
        "taking_turns",
        "Two workflows on one account take turns",
        "Orders A and B change account 42, four locked tasks each. Order C changes account 7.",
        "A and B never hold the lock at the same time, and get it in the order in which they ask. "
        "C runs beside them. The number after `in` is the fencing token (its last digits). It only "
        "rises.",
    ),
    Step(
        "calling_a_locked_task",
        "A locked task calls a locked task",
        "`transfer` holds account 42 and calls `charge`, which needs account 42 as well. With a "
        "lock that cannot be re-entered, it would wait for itself.",
        "`charge` re-enters at once, with its caller's fencing token. A stranger waits until "
        "`transfer` has released the lock as well.",
    ),
    Step(
        "failing",
        "A task that fails releases its lock",
        "`audit` raises a ValueError. Its lease would go on for 30 s.",
        "the next task acquires the lock at the moment of the failure.",
    ),
    Step(
        "dying",
        "The lock of a killed process becomes free",
        "`report` holds account 42 under a lease of 2 s, which is renewed while its process "
        "lives. After 3 s that process gets a SIGKILL, and cannot release the lock.",
        "the seconds from the kill until the next task acquires the lock.",
    ),
)


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    screen = Screen()
    screen.say("celery-relock: locks for Celery tasks that may call each other", "bold")
    given = sys.argv[1] if sys.argv[1:] else ""
    try:
        with Given(given) if given else Servers() as servers:
            return show(screen, servers)
    except KeyboardInterrupt as interrupt:
        rest = "." if given else "; Redis and the worker are stopped."
        screen.say(f"\nInterrupted{rest}")
        return 128 + int(interrupt.args[0])
    except RuntimeError as error:
        screen.say(str(error), "bold red")
        return 1


def show(screen: Screen, servers: Servers | Given) -> int:
    os.environ["DEMO_REDIS_URL"] = servers.url
    from demo.steps import Steps  # its tasks need the URL when they are imported

    screen.say(f"Redis:  {servers.url}, {servers.redis}")
    screen.say(f"Worker: {servers.worker}")
    steps = Steps(screen)
    try:
        steps.wait_for_worker()
        for number, step in enumerate(STEPS, 1):
            screen.step(f"{number}. {step.title}", step.about, step.look)
            time.sleep(PAUSE if screen.live else 0)
            getattr(steps, step.method)()
    except TimeoutError as error:
        screen.say(f"{error}. The worker's last words:", "bold red")
        screen.say(servers.last_words())
        return 1
    screen.say()
    screen.verdict(not steps.failed, "all of this was checked as it happened")
    return 1 if steps.failed else 0


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    sys.exit(main())
