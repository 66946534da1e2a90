#!/usr/bin/env python3
"""Break every rule of the Lua scripts, and of the order in worker/execution.py, in turn and see
whether the tests notice.

    python scripts/mutate.py                  all of scripts/mutants.txt; writes docs/mutations.md
    python scripts/mutate.py --only fence    those with this text in rule or file; writes nothing

Works on copies in a temporary folder, one per job: the tree itself is never changed. Ends with
status 1 if a broken rule goes unnoticed, or no longer applies.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("tests/lua", "tests/property")
COPIED = ("celery_relock", "lua", "tests", "docs", "pyproject.toml", "README.md")
TABLE = ROOT / "scripts" / "mutants.txt"
REPORT = ROOT / "docs" / "mutations.md"

INTRODUCTION = """\
# Does a test notice when a rule is broken?

Each line is a rule of the Lua scripts, or of the order in which `worker/execution.py` does things.
`python scripts/mutate.py` breaks one after the other, in a copy, and runs `tests/lua` on each
(examples, on this machine's Redis and on 6.2), and where those stay green `tests/property` (random
histories against a plain model); for `execution.py` the tests that stand beside the rule in
`scripts/mutants.txt`. A rule whose breaking no test notices is a missing test; the command then
ends with status 1. This page is its output. With `--both` the property test is asked about every
rule, which takes three times as long.

The examples name what they check; of the property test the check that failed first is named.

`RELOCK_LONG=1 python -m pytest tests/property` runs the property test for 20,000 histories of up to
60 steps instead of 200 of up to 30.

"""


class Mutant(NamedTuple):
    """One broken rule: in `file`, of lua/ or of the package, `old` (there once) becomes `new`, and
    one of the suites is to notice."""

    file: str
    rule: str
    old: str
    new: str
    suites: tuple[str, ...] = SUITES

    def path(self, tree: Path) -> Path:
        """Where the file is in a tree."""
        return tree / self.file if self.file.endswith(".py") else tree / "lua" / self.file


class Verdict(NamedTuple):
    mutant: Mutant
    red: dict[str, str]  # suite -> the first test or check that failed
    note: str = ""


def mutants() -> list[Mutant]:
    blocks = TABLE.read_text("utf-8").split("\n\n")[1:]
    return [_mutant(*block.strip("\n").splitlines()) for block in blocks]


def _mutant(title: str, *edit: str) -> Mutant:
    file, rule = title.split(": ", 1)
    old, new = ("\n".join(line[1:] for line in edit if line[0] == sign) for sign in "-+")
    suites = tuple(line[2:] for line in edit if line.startswith("@ ")) or SUITES
    return Mutant(file, rule, old, new, suites)


def copy_tree(to: Path) -> Path:
    to.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            # The package's link to lua/ stays a link, into the copy.
            shutil.copytree(
                source, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(source, to / name)
    return to


def run_suite(suite: str, where: Path) -> str:
    """The first test that failed, or "" when all passed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        suite,
        "-x",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    env = {**os.environ, "PYTHONPATH": str(where), "RELOCK_QUICK": "1", "RELOCK_LONG": ""}
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    if done.returncode != 1:
        raise RuntimeError(f"pytest {suite} did not run:\n{done.stdout}\n{done.stderr}")
    checks = re.findall(r"tests/property/\w+\.py:\d+: in (\w+)", done.stdout)
    tests = re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    return [*tests, *checks][-1]


def judge(mutant: Mutant, folders: queue.Queue[Path], both: bool) -> Verdict:
    where = folders.get()
    path, text = mutant.path(where), mutant.path(ROOT).read_text("utf-8")
    try:
        if text.count(mutant.old) != 1:
            return Verdict(
                mutant, {}, f"the text to change is there {text.count(mutant.old)} times"
            )
        path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        red = {}
        for suite in mutant.suites:
            red[suite] = run_suite(suite, where)
            if red[suite] and not both:
                break
        return Verdict(mutant, red)
    finally:
        path.write_text(text, "utf-8")
        folders.put(where)


def table(verdicts: list[Verdict]) -> str:
    lines = [
        "| file | rule | goes red |",
        "|---|---|---|",
    ]
    for mutant, red, note in verdicts:
        cell = ", ".join(f"`{test}`" for test in red.values() if test) or "-"
        lines.append(f"| {mutant.file} | {mutant.rule} | {cell} |{note}")
    noticed = sum(any(verdict.red.values()) for verdict in verdicts)
    return "\n".join([*lines, "", f"{noticed} of {len(verdicts)} broken rules are noticed."]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the rule or of the file's name")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many at the same time")
    parser.add_argument("--both", action="store_true", help="the property test for every rule")
    options = parser.parse_args()
    chosen = [m for m in mutants() if options.only in f"{m.file}: {m.rule}"]

    with tempfile.TemporaryDirectory(prefix="relock-mutants-") as temporary:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            folders.put(copy_tree(Path(temporary) / str(number)))
        for suite in sorted({suite for each in chosen for suite in each.suites}):
            if red := run_suite(suite, Path(temporary) / "0"):
                print(f"the scripts as they are fail already: {suite}: {red}")
                return 1
        verdicts = []
        with ThreadPoolExecutor(options.jobs) as pool:
            started = time.monotonic()
            for verdict in pool.map(lambda mutant: judge(mutant, folders, options.both), chosen):
                verdicts.append(verdict)
                state = "noticed" if any(verdict.red.values()) else "NOT NOTICED"
                passed = time.monotonic() - started
                print(f"{passed:5.0f} s  {state}  {verdict.mutant.file}: {verdict.mutant.rule}")
                print(f"         {verdict.note or list(verdict.red.values())}", flush=True)
    if not options.only:
        REPORT.write_text(INTRODUCTION + table(verdicts), "utf-8")
    return 0 if all(any(verdict.red.values()) for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
