"""Rounds and tables, which all measurements share.

On a shared machine, one long run of each contender would compare the moments at which they ran. So
every contender runs briefly in every round, and is compared with the others of that round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def interleave(cases: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every case once in each round. Returns the results by case, in order of the rounds."""
    results: dict[str, list[T]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds):
        # Each round begins with another case, so that no case always follows a heavy one.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(cases[name]())
    return results


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratios, round by round."""
    return [value / reference for value, reference in zip(values, base, strict=True)]


def spread(values: Sequence[float]) -> str:
    """The median, and the range of the middle half."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
