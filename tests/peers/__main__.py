"""The same scenarios for every library, live: `python -m tests.peers [library …]`.

Those that are not installed are left out. They can be had by
`pip install celery-once six celery-singleton celery-heimdall`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from importlib.metadata import version

from tests.peers.bench import Bench, Defect
from tests.peers.scenarios import SCENARIOS
from tests.support import RedisServer

PEERS = {
    "celery-once": "celery_once",
    "celery-singleton": "celery_singleton",
    "celery-heimdall": "celery_heimdall",
    "celery-relock": "celery_relock",
}

# How a defect is called in the table; the whole of it is in the output on the way.
WORDS = {
    r"LEAK.*": "leak",
    r"\d+ run at the same time": "overlap",
    r"the (?:rest|body) never runs.*": "hangs",
    r"fewer than \d+ executions": "retry lost",
    r"the (sender waits .*|worker hangs)": r"\1",
}


def in_short(verdict: str) -> str:
    for pattern, word in WORDS.items():
        if re.fullmatch(pattern, verdict):
            return re.sub(pattern, word, verdict, count=1)
    return verdict


def verdicts(url: str, peer: str) -> dict[str, str]:
    """What became of each scenario: "ok", or the defect."""
    found, bench = {}, Bench(url, peer)
    for title, scenario in SCENARIOS.items():
        try:
            scenario(bench)
            found[title] = "ok"
        except Defect as defect:
            found[title] = str(defect)
        except Exception as error:
            found[title] = f"{type(error).__name__}: {error:.60}"
        print(f"{peer}: {title}: {found[title]}", file=sys.stderr)
        if found[title] != "ok":  # what is left of it shall not spoil the next
            bench.close()
            bench = Bench(url, peer)
    bench.close()
    return found


def main(wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    there = [
        peer
        for peer, module in PEERS.items()
        if (not wanted or peer in wanted) and importlib.util.find_spec(module)
    ]
    server = RedisServer()
    try:
        columns = {peer: verdicts(server.url, peer) for peer in there}
    finally:
        server.stop()
    versions = [f"{peer} {version(peer)}" for peer in there]
    print(f"Celery {version('celery')}, redis-py {version('redis')}\n")
    print(f"| | {' | '.join(versions)} |")
    print("|---" * (len(there) + 1) + "|")
    for title in SCENARIOS:
        print(f"| {title} | {' | '.join(in_short(columns[peer][title]) for peer in there)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
