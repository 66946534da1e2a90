"""Draw the diagrams of docs/architecture.md from the texts in docs/pictures: each .txt to an .svg.

    .venv/bin/python scripts/draw_diagrams.py [--check]

`house.txt` has a title, and a line for each floor: its rooms, separated by bars. A sequence has a
title, a line of actors, separated by bars, and then one step per line:

    a -> b: text     a call; `-->` is an answer
    a: text          what an actor does by itself
    [ a   ] a        from here to there the actor holds the lock
    == text ==       across all actors

`--check` writes nothing and fails if a picture does not match its text.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
WIDTH, STEP, TOP = 880, 32, 44
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1a202c }
.actor { font-weight: 600 }
.line { stroke: #cbd5e0; stroke-width: 1 }
.arrow { stroke: #4a5568; stroke-width: 1.5; fill: none; marker-end: url(#head) }
.answer { stroke-dasharray: 5 4 }
.head { fill: #4a5568 }
.holds { fill: #2b6cb0 }
.room { fill: #ebf4fb; stroke: #cbd5e0 }
.small { font-size: 11.5px }
.dot { fill: #4a5568 }
.back { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e2e8f0 }
  .line { stroke: #4a5568 }
  .arrow { stroke: #a0aec0 }
  .head, .dot { fill: #a0aec0 }
  .holds { fill: #63b3ed }
  .room { fill: #2d3748; stroke: #4a5568 }
  .back { fill: #1a202c }
}"""
HEAD = """<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"
markerHeight="7" orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>"""
_CALL = re.compile(r"(.+?) (-->|->) (.+?): (.+)")


def sequence(text: str) -> str:
    """The picture of one sequence, as SVG."""
    title, actors, *rest = text.splitlines()
    names = [name.strip() for name in actors.split("|")]
    room = WIDTH / len(names)
    at = {name: round(room * (number + 0.5)) for number, name in enumerate(names)}
    held, bars, marks, y = {}, [], [], TOP
    for line in filter(None, rest):
        if line[0] in "[]":
            name = line[1:].strip()
            if line[0] == "[":
                held[name] = y - STEP / 3
            else:
                bars.append((at[name], held.pop(name), y - STEP / 3))
            continue
        y += STEP
        marks += _step(line, at, y)
    bars += [(at[name], since, y + STEP / 2) for name, since in held.items()]
    height = y + STEP
    parts = []
    for name, x in at.items():
        parts.append(_text(x, 26, name, "actor"))
        parts.append(f'<line class="line" x1="{x}" y1="36" x2="{x}" y2="{height - 8}"/>')
    for x, start, end in bars:
        box = f'x="{x - 4}" y="{start:.0f}" width="8" height="{end - start:.0f}"'
        parts.append(f'<rect class="holds" {box} rx="3"/>')
    return _picture(title, height, [*parts, *marks])


def house(text: str) -> str:
    """The picture of the floors, as SVG."""
    title, *floors = text.splitlines()
    parts, y = [], 16
    for floor in floors:
        rooms = [room.strip() for room in floor.split("|")]
        width = (WIDTH - 16) / len(rooms)
        for number, room in enumerate(rooms):
            x, (name, _, what) = 8 + number * width, room.partition(" ")
            box = f'x="{x + 4:.0f}" y="{y}" width="{width - 8:.0f}" height="52" rx="6"'
            parts.append(f'<rect class="room" {box}/>')
            middle = round(x + width / 2)
            parts.append(_text(middle, y + 21, name, "actor"))
            parts.append(_text(middle, y + 40, what, "small"))
        if floor is not floors[-1]:
            parts.append(f'<path class="arrow" d="M{WIDTH // 2},{y + 52} V{y + 70}"/>')
        y += 72
    return _picture(title, y, parts)


def _picture(title: str, height: int, parts: list[str]) -> str:
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        HEAD,
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _step(line: str, at: dict[str, int], y: int) -> list[str]:
    if line.startswith("=="):
        across = f'<line class="line" x1="8" y1="{y - 5}" x2="{WIDTH - 8}" y2="{y - 5}"/>'
        return [across, *_label(WIDTH // 2, y, line.strip("= "))]
    if (call := _CALL.fullmatch(line)) is None:
        name, _, text = line.partition(": ")
        x = at[name]
        dot = f'<circle class="dot" cx="{x}" cy="{y - 4}" r="4"/>'
        # Beside the line, where there is room.
        if x + 7 * len(text) < WIDTH:
            return [dot, _text(x + 12, y, text, anchor="start")]
        return [dot, _text(x - 12, y, text, anchor="end")]
    source, arrow, target, text = call.groups()
    start, end = at[source], at[target]
    aside = 7 if end > start else -7
    kind = "arrow answer" if arrow == "-->" else "arrow"
    path = f'<path class="{kind}" d="M{start + aside},{y} H{end - aside}"/>'
    return [*_label((start + end) // 2, y - 6, text), path]


def _label(x: int, y: int, text: str) -> list[str]:
    """A text that stays inside the picture and is not crossed by an actor's line."""
    half = int(len(text) * 3.3) + 4
    x = min(max(x, half + 2), WIDTH - half - 2)
    box = f'<rect class="back" x="{x - half}" y="{y - 11}" width="{2 * half}" height="14"/>'
    return [box, _text(x, y, text)]


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "middle") -> str:
    of = f' class="{kind}"' if kind else ""
    return f'<text{of} x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def main(checks: bool) -> None:
    for source in sorted(PICTURES.rglob("*.txt")):
        draw = house if source.stem == "house" else sequence
        picture, target = draw(source.read_text("utf-8")), source.with_suffix(".svg")
        if not checks:
            target.write_text(picture, "utf-8")
        elif not target.exists() or target.read_text("utf-8") != picture:
            sys.exit(f"{target} is not what {source} says: run scripts/draw_diagrams.py")


if __name__ == "__main__":
    main("--check" in sys.argv)
