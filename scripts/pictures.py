"""Draw the pictures of docs/how-it-works.md: lanes over time, from left to right.

    python -m scripts.pictures

The pictures follow the reader's light or dark mode. They have their own background, because the
page around them can be in the other mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
WIDTH, LEFT, TOP, ROW, BAR = 760, 150, 34, 58, 28
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1a202c }
.small { font-size: 12px; fill: #4a5568 }
.inside { fill: #ffffff }
.dark { fill: #1a202c }
.line { stroke: #cbd5e0; stroke-width: 1 }
.arrow { stroke: #4a5568; stroke-width: 1.5; fill: none; marker-end: url(#head) }
.head { fill: #4a5568 }
.holds { fill: #2b6cb0 }
.waits { fill: #e2e8f0 }
.parked { fill: #bee3f8 }
.dead { fill: #fed7d7 }
.back { fill: #ffffff }
@media (prefers-color-scheme: dark) {
  text { fill: #e2e8f0 }
  .small { fill: #a0aec0 }
  .inside { fill: #ffffff }
  .dark { fill: #1a202c }
  .line { stroke: #4a5568 }
  .arrow { stroke: #a0aec0 }
  .head { fill: #a0aec0 }
  .back { fill: #1a202c }
}"""
BACK = '<rect class="back" width="100%" height="100%" rx="6"/>'


HEAD = """\
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
orient="auto"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>"""


@dataclass(frozen=True)
class Bar:
    """A state from `start` to `end`, in a picture that is 10 wide."""

    start: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True)
class Arrow:
    """Something that happens at a time, from one lane to another."""

    at: float
    source: int
    target: int
    text: str


@dataclass(frozen=True)
class Picture:
    title: str
    lanes: dict[str, list[Bar]]
    arrows: list[Arrow]


DRAWN = {
    "life": Picture(
        "A task acquires its lock, renews the lease while the body runs, and releases the lock",
        {
            "worker process": [Bar(1, 8.5, "holds", "body runs, lock held")],
            "Redis": [Bar(1, 8.5, "parked", "hold with a lease of 30 s, renewed every 10 s")],
        },
        [
            Arrow(1, 0, 1, "acquire"),
            Arrow(3.5, 0, 1, "renew"),
            Arrow(6, 0, 1, "renew"),
            Arrow(8.5, 0, 1, "release"),
        ],
    ),
    "wait": Picture(
        "The second task is parked in Redis; when the first one releases the lock, it is resumed",
        {
            "process 1": [Bar(0.3, 5, "holds", "first task holds account:42")],
            "process 2": [
                Bar(1.2, 1.5, "waits", ""),
                Bar(1.7, 4.6, "waits", "free for other tasks"),
                Bar(6.1, 9.9, "holds", "second task holds account:42"),
            ],
            "Redis": [Bar(1.5, 5.9, "parked", "second task parked, first in queue")],
        },
        [
            Arrow(1.5, 1, 2, "park"),
            Arrow(5, 0, 2, "release"),
            Arrow(6.1, 2, 1, "resume"),
        ],
    ),
    "crash": Picture(
        "A worker process is killed; another process of the host releases its lock",
        {
            "process 1": [
                Bar(0.3, 4, "holds", "task holds account:42"),
                Bar(4, 4.6, "dead", "killed"),
            ],
            "main process": [Bar(0.3, 9.7, "waits", "watches the processes of its host")],
            "process 2": [Bar(5.6, 9.5, "holds", "next task holds account:42")],
        },
        [
            Arrow(4.7, 0, 1, "sees it, releases the lock"),
            Arrow(5.6, 1, 2, "resume"),
        ],
    ),
}


def svg(picture: Picture) -> str:
    lanes = list(picture.lanes.items())
    height = TOP + ROW * len(lanes) + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(picture.title)}</title>",
        f"<style>{STYLE}</style>",
        HEAD,
        BACK,
    ]
    for row, (name, bars) in enumerate(lanes):
        y = _middle(row)
        lines.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<line class="line" x1="{LEFT}" y1="{y}" x2="{WIDTH - 10}" y2="{y}"/>')
        lines += [part for bar in bars for part in _bar(bar, y)]
    lines += [part for arrow in picture.arrows for part in _arrow(arrow)]
    return "\n".join([*lines, "</svg>", ""])


def _middle(row: int) -> int:
    return TOP + ROW * row + BAR // 2


def _x(at: float) -> float:
    return LEFT + at / 10 * (WIDTH - LEFT - 10)


def _bar(bar: Bar, y: int) -> list[str]:
    left, right = _x(bar.start), _x(bar.end)
    shape = (
        f'<rect class="{bar.kind}" x="{left:.0f}" y="{y - BAR // 2}" width="{right - left:.0f}" '
        f'height="{BAR}" rx="4"/>'
    )
    ink = "inside" if bar.kind == "holds" else "dark"
    text = f'<text class="{ink}" x="{(left + right) / 2:.0f}" y="{y + 4}" text-anchor="middle">'
    return [shape, f"{text}{escape(bar.text)}</text>"] if bar.text else [shape]


def _arrow(arrow: Arrow) -> list[str]:
    x, down = _x(arrow.at), 1 if arrow.target > arrow.source else -1
    start, end = _middle(arrow.source) + down * BAR // 2, _middle(arrow.target) - down * BAR // 2
    y = _middle(max(arrow.source, arrow.target)) - ROW // 2 + 4
    return [
        f'<line class="arrow" x1="{x:.0f}" y1="{start}" x2="{x:.0f}" y2="{end}"/>',
        f'<text class="small" x="{x + 6:.0f}" y="{y}">{escape(arrow.text)}</text>',
    ]


if __name__ == "__main__":
    for name, picture in DRAWN.items():
        (PICTURES / f"{name}.svg").write_text(svg(picture))
