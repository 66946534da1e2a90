#!/usr/bin/env python3
"""Break every rule of scripts/mutants.txt, in Lua and in Python, in turn and see whether the tests
notice.

    python scripts/mutate.py                  all of them
    python scripts/mutate.py --only fence    those with this text in rule or file

Works on copies in a temporary folder, one per job: the tree itself is never changed. The test that
noticed a rule the last time is asked first. docs/mutations.md keeps what was seen, so a run that
was stopped goes on where it was. A rule is asked about again when the code of its file or of its
test has changed. Ends with status 1 if a broken rule goes unnoticed, or no longer applies.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("tests/lua", "tests/property")
COPIED = ("celery_relock", "lua", "tests", "docs", "pyproject.toml", "README.md")
TABLE = ROOT / "scripts" / "mutants.txt"
REPORT = ROOT / "docs" / "mutations.md"

INTRODUCTION = """\
# Does a test notice when a rule is broken?

Each line is a rule in `scripts/mutants.txt`, of a Lua script or of a Python file of the package.
`python scripts/mutate.py` breaks one after the other, in a copy, and runs the tests that stand
beside it there. For most rules in Lua none do: then it runs `tests/lua` (examples, on this
machine's Redis and on 6.2), and where those stay green `tests/property` (random histories against a
plain model). A rule whose breaking no test notices is a missing test; the command then ends with
status 1. This page is its output.

The examples name what they check; of the property test the check that failed first is named. The
last column changes with the code of the rule's file and of the test.

`RELOCK_LONG=1 python -m pytest tests/property` runs the property test for 20,000 histories of up to
60 steps instead of 200 of up to 30.

"""


# File and rule -> the test that noticed it the last time, "" for none, and the state then.
Seen: TypeAlias = "dict[tuple[str, str], tuple[str, str]]"


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


def _code(path: Path) -> str:
    """What a file does: its text without comments, but for those that the loader of Lua reads."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        return ast.dump(ast.parse(text))
    return re.sub(r"^ *--(?! Uses:).*\n", "", text, flags=re.MULTILINE)


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


def run_suite(suite: str, where: Path, test: str = "") -> str:
    """The first test that failed, or "" when all passed.

    Args:
        test: ask no other than this one.
    """
    only = ["-k", test] if test else []
    command = [sys.executable, "-m", "pytest", suite, *only]
    command += ["-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(where), "RELOCK_QUICK": "1", "RELOCK_LONG": ""}
    done = subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    checks = re.findall(r"tests/property/\w+\.py:\d+: in (\w+)", done.stdout)
    tests = re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or not tests:  # such as an error after the last test
        raise RuntimeError(
            f"pytest {suite} ended with {done.returncode} and no failed test:\n"
            f"{done.stdout}\n{done.stderr}"
        )
    return [*tests, *checks][-1]


def seen_before() -> Seen:
    """What the page says of the rules that were noticed."""
    rows = re.findall(
        r"^\| (\S+) \| (.+) \| `(\w+)` \| (\w+) \|$", REPORT.read_text("utf-8"), re.MULTILINE
    )
    return {(file, rule): (test, state) for file, rule, test, state in rows}


def find_test(name: str, suites: tuple[str, ...], where: Path) -> str:
    """The file of a test, or the suite of a check, "" if there is none of that name."""
    for suite in suites:
        files = [where / suite, *(where / suite).rglob("*.py")]
        for file in (file for file in files if file.is_file()):
            if f"def {name}(" in file.read_text("utf-8"):
                return str(file.relative_to(where)) if name.startswith("test_") else suite
    return ""


def state_of(mutant: Mutant, test: str, where: Path) -> str:
    """Changes with the rule and the code of its file, and of the file of a test or the suite of a
    check."""
    place = where / (find_test(test, mutant.suites, where) or "-")
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []
    texts = map(_code, (mutant.path(where), *files))
    whole = "\0".join((mutant.old, mutant.new, *texts))
    return hashlib.sha256(whole.encode()).hexdigest()[:8]


def ask_test(name: str, suites: tuple[str, ...], where: Path) -> str:
    """The test if it fails, or the check if its suite does, "" if not."""
    place = find_test(name, suites, where)
    return run_suite(place, where, name if name.startswith("test_") else "") if place else ""


def judge(mutant: Mutant, where: Path, before: str) -> str:
    """The test or check that notices, "" if none does."""
    path = mutant.path(where)
    text = path.read_text("utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        if before and (red := ask_test(before, mutant.suites, where)):
            return red
        return next((red for suite in mutant.suites if (red := run_suite(suite, where))), "")
    finally:
        path.write_text(text, "utf-8")


def report(every: list[Mutant], seen: Seen, known: set[Mutant]) -> str:
    """The page. `known`: the rules that were asked about since their file or test changed."""
    lines = ["| file | rule | goes red | code |", "|---|---|---|---|"]
    for mutant in every:
        test, state = seen.get(mutant[:2], ("", ""))
        nothing = "nothing" if mutant in known else "not asked yet"
        cell = f"`{test}`" if test else nothing
        lines.append(f"| {mutant.file} | {mutant.rule} | {cell} | {state} |")
    noticed = [mutant for mutant in known if seen[mutant[:2]][0]]
    ending = f"{len(noticed)} of {len(known)} broken rules are noticed."
    if others := len(every) - len(known):
        ending += (
            f" The other {others} have not been asked about since their file, or the file of their"
            " test, changed; the next run asks about them."
        )
    return INTRODUCTION + "\n".join([*lines, "", *textwrap.wrap(ending, 100)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="a part of the rule or of the file's name")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many at the same time")
    options = parser.parse_args()
    every = mutants()
    chosen = [m for m in every if options.only in f"{m.file}: {m.rule}"]
    seen = seen_before()

    with tempfile.TemporaryDirectory(prefix="relock-mutants-") as temporary:
        folders: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            folders.put(copy_tree(Path(temporary) / str(number)))
        # The tree may change meanwhile, and in the others a rule is broken.
        whole = copy_tree(Path(temporary) / "whole")
        for mutant in chosen:
            if mutant.path(whole).read_text("utf-8").count(mutant.old) != 1:
                print(f"the text to change is not there once: {mutant.file}: {mutant.rule}")
                return 1

        def is_known(mutant: Mutant) -> bool:
            test, state = seen.get(mutant[:2], ("", ""))
            return bool(test) and state == state_of(mutant, test, whole)

        known = {mutant for mutant in every if is_known(mutant)}
        asked = [mutant for mutant in chosen if mutant not in known]
        sound: set[str] = set()
        started = time.monotonic()

        def ask(mutant: Mutant) -> tuple[Mutant, str]:
            where = folders.get()
            try:
                before, _ = seen.get(mutant[:2], ("", ""))
                red = judge(mutant, where, before)
                if red and red not in sound:
                    if ask_test(red, mutant.suites, where):
                        raise RuntimeError(f"{red} fails though nothing is broken")
                    sound.add(red)
                return mutant, red
            finally:
                folders.put(where)

        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, red in pool.map(ask, asked):
                seen[mutant[:2]] = red, state_of(mutant, red, whole)
                known.add(mutant)
                REPORT.write_text(report(every, seen, known), "utf-8")
                passed = time.monotonic() - started
                state = f"noticed by {red}" if red else "NOT NOTICED"
                print(f"{passed:5.0f} s  {mutant.file}: {mutant.rule}: {state}", flush=True)
    REPORT.write_text(report(every, seen, known), "utf-8")
    return 0 if all(seen[mutant[:2]][0] for mutant in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
