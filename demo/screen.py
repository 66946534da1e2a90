"""How the demo looks: a line for each event as it comes, in a lane for each workflow, then bars."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from demo.timeline import Event

_WIDTH = 80
_INDENT = "   "
_CLOCK = 9
_STYLES = {
    "asks": "yellow",
    "waits": "yellow",
    "in": "green",
    "out": "dim",
    "fails": "red",
    "killed": "bold red",
}


class Screen:
    """A terminal, or a plain file: then there are no colours.

    Attributes:
        live: whether it is a terminal, so that somebody may be reading along.
    """

    def __init__(self) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
        self._console = Console(width=_WIDTH, highlight=False, markup=False, emoji=False)
        self.live = self._console.is_terminal
        self._signs = "░█✓✗" if self._console.encoding.startswith("utf") else ".#+!"
        self._lanes: tuple[str, ...] = ()
        self._start = 0.0

    def say(self, text: str = "", style: str = "") -> None:
        self._console.print(text, style=style, soft_wrap=True)

    def step(self, title: str, about: str, look: str) -> None:
        self.say(f"\n{title}", "bold")
        for text, style in (about, ""), (f"Look at: {look}", "cyan"):
            self.say(textwrap.indent(textwrap.fill(text, _WIDTH - len(_INDENT)), _INDENT), style)
        self.say()

    def lanes(self, lanes: Mapping[str, str]) -> None:
        """Head the columns: who -> what to know of them."""
        self._lanes, self._start = tuple(lanes), 0.0
        for heads in lanes.keys(), lanes.values():
            cells = "".join(head.ljust(self._room) for head in heads)
            self.say(
                f"{_INDENT}{'':{_CLOCK}}{cells}".rstrip(), "bold" if heads is lanes.keys() else ""
            )

    def event(self, event: Event) -> None:
        self._start = self._start or event.at
        before = " " * (self._room * self._lanes.index(event.who))
        line = Text(f"{_INDENT}{event.at - self._start:5.2f} s  ", style="dim")
        line.append(before + _told(event), style=f"not dim {_STYLES[event.what]}")
        self._console.print(line)

    def bars(self, events: Sequence[Event]) -> None:
        """The step at a glance: who waited and who was in, over the time that it took."""
        first, last = events[0].at, events[-1].at
        cells = _WIDTH - len(_INDENT) - _CLOCK - 1
        signs = dict.fromkeys(("asks", "waits"), self._signs[0]) | {"in": self._signs[1]}
        scale = cells / max(last - first, 0.001)
        self.say()
        for who in self._lanes:
            bar = [" "] * cells
            own = [event for event in events if event.who == who]
            for one, two in pairwise(own):
                begin, end = round((one.at - first) * scale), round((two.at - first) * scale)
                bar[begin:end] = [signs.get(one.what, " ")] * (end - begin)
            line = Text(f"{_INDENT}{who:<{_CLOCK}}")
            for cell in bar:
                line.append(cell, style="green" if cell == signs["in"] else "yellow")
            line.rstrip()
            self._console.print(line)
        legend = f"{signs['asks']} waits  {signs['in']} holds the lock"
        self.say(
            f"{_INDENT}{'':{_CLOCK}}{legend}{f'{last - first:.1f} s':>{cells - len(legend)}}", "dim"
        )
        self.say()

    def verdict(self, good: bool, text: str) -> None:
        sign = self._signs[2] if good else f"{self._signs[3]} NOT SO:"
        self.say(f"{_INDENT}{sign} {text}", "green" if good else "bold red")

    @property
    def _room(self) -> int:
        return (_WIDTH - len(_INDENT) - _CLOCK) // len(self._lanes)


def _told(event: Event) -> str:
    # The last digits tell fences apart; all sixteen would not fit.
    fence = f"…{event.fence % 10**9:09}"
    return {
        "asks": f"{event.note} asks",
        "waits": f"{event.note} waits",
        "in": f"{event.note} in {'again ' if event.again else ''}{fence}",
        "out": f"{event.note} out",
        "fails": f"{event.note}",
        "killed": f"{event.note}",
    }[event.what]
