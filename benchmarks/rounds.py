"""Rounds and tables: what all measurements share.

On a machine that others use too, one long run of each contender compares the moments at which they
ran. So everybody runs briefly in every round, and is compared with the others of that round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def interleave(cases: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every case once in each round; results by case, in the order of the rounds."""
    results: dict[str, list[T]] = {name: [] for name in cases}
    names = list(cases)
    for number in range(rounds):
        # Another one begins each time: whoever follows a heavy one must not do so always.
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(cases[name]())
    return results


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round."""
    return [value / reference for value, reference in zip(values, base, strict=True)]


def spread(values: Sequence[float]) -> str:
    """The median, and between which values the middle half lies."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def percentile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
