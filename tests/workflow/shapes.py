"""Every shape of a canvas, with the parts of it that may be locked (see `apps.shapes`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import chain, chord, group


class Maker:
    """What a canvas is made of. `lock` is `locked`, or leaves a canvas as it is."""

    def __init__(self, module: Any, run: str, lock: Callable[[Any], Any]) -> None:
        self.module = module
        self.run = run
        self.lock = lock

    def s(self, name: str) -> Any:
        return self.module.step.s(run=self.run, name=name)

    def lock_first(self, canvas: Any) -> Any:
        """What `locked` gives, without a lock: a task goes ahead of the canvas."""
        return self.module.passes.s() | canvas if getattr(canvas, "tasks", True) else canvas

    def none(self) -> Any:
        # With no member to ask, Celery takes the current app, which need not be this one.
        return group([], app=self.module.app)

    def j(self, name: str) -> Any:
        return self.module.join.s(run=self.run, name=name)


def nested(m: Maker, deep: int, name: str = "A") -> Any:
    if not deep:
        return m.s(name)
    inner = nested(m, deep - 1, f"{name}{deep}")
    return chain(group(inner, m.s(f"{name}0")), m.j(f"{name}j"))


# The steps of one locked part have names that begin with the same capital letter; those outside of
# all have small ones.
SHAPES: dict[str, Callable[[Maker], Any]] = {
    "task": lambda m: m.lock(m.s("A")),
    "chain": lambda m: m.lock(chain(m.s("A1"), m.s("A2"), m.s("A3"))),
    "empty chain": lambda m: m.lock(chain()),
    "group": lambda m: m.lock(group(m.s("A1"), m.s("A2"), m.s("A3"))),
    "group of one": lambda m: m.lock(group([m.s("A")])),
    "group of none": lambda m: m.lock(m.none()),
    "group by a generator": lambda m: m.lock(group(m.s(f"A{n}") for n in range(3))),
    "group of one chain that ends in a group": lambda m: m.lock(
        group([chain(m.s("A1"), group(m.s("A2"), m.s("A3")))])
    ),
    "group in a group, all locked": lambda m: m.lock(
        group(group(m.s("A1"), m.s("A2")), m.s("A3"), group([m.s("A4")]))
    ),
    "locked group in a group": lambda m: group(m.lock(group(m.s("A1"), m.s("A2"))), m.s("b")),
    "locked group of one in a group": lambda m: group(m.lock(group([m.s("A1")])), m.s("b")),
    "locked group of none in a group": lambda m: group(m.lock(m.none()), m.s("b")),
    "locked groups in a group": lambda m: group(
        m.lock(group(m.s("A1"), m.s("A2"))), m.lock(group(m.s("B1"), m.s("B2"), m.s("B3")))
    ),
    "locked group in a group in a group": lambda m: group(
        m.s("a"), group(m.s("b"), m.lock(group(m.s("C1"), group(m.s("C2"), m.s("C3")))))
    ),
    "group of locked chains": lambda m: group(
        m.lock(chain(m.s("A1"), m.s("A2"))), m.lock(chain(m.s("B1"), m.s("B2")))
    ),
    "group of chains": lambda m: m.lock(
        group(chain(m.s("A1"), m.s("A2")), chain(m.s("A3"), m.s("A4")))
    ),
    "group of chords": lambda m: m.lock(
        group(chord([m.s("A1"), m.s("A2")], m.j("Aj")), chord([m.s("A3")], m.j("Ai")))
    ),
    "group of chains that end in groups": lambda m: m.lock(
        group(chain(m.s("A1"), group(m.s("A2"), m.s("A3"))), m.s("A4"))
    ),
    "locked group | task": lambda m: m.lock(group(m.s("A1"), m.s("A2"))) | m.j("x"),
    "locked group of one | task": lambda m: m.lock(group([m.s("A1")])) | m.j("x"),
    "locked group of none | task": lambda m: m.lock(m.none()) | m.j("x"),
    "locked group | chain": lambda m: (
        m.lock(group(m.s("A1"), m.s("A2"))) | chain(m.j("x"), m.s("y"))
    ),
    "locked group | group": lambda m: (
        m.lock(group(m.s("A1"), m.s("A2"))) | group(m.j("x"), m.j("y"))
    ),
    "locked group | locked group": lambda m: (
        m.lock(group(m.s("A1"), m.s("A2"))) | m.lock(group(m.j("B1"), m.j("B2")))
    ),
    "task | locked group": lambda m: m.s("a") | m.lock(group(m.s("B1"), m.s("B2"))),
    "task | locked group of one": lambda m: m.s("a") | m.lock(group([m.s("B1")])),
    "task | locked group | task": lambda m: (
        m.s("a") | m.lock(group(m.s("B1"), m.s("B2"))) | m.j("c")
    ),
    "task | locked group of one | task": lambda m: m.s("a") | m.lock(group([m.s("B1")])) | m.s("c"),
    "group | task, locked": lambda m: m.lock(group(m.s("A1"), m.s("A2")) | m.j("A3")),
    "group | locked task": lambda m: group(m.s("a"), m.s("b")) | m.lock(m.j("C")),
    "locked task | task": lambda m: m.lock(m.s("A")) | m.s("b"),
    "locked chain | task": lambda m: m.lock(chain(m.s("A1"), m.s("A2"))) | m.s("b"),
    "task | locked chain": lambda m: m.s("a") | m.lock(chain(m.s("B1"), m.s("B2"))),
    "task | locked chord": lambda m: m.s("a") | m.lock(chord([m.s("B1"), m.s("B2")], m.j("Bj"))),
    "locked chord | task": lambda m: m.lock(chord([m.s("A1"), m.s("A2")], m.j("Aj"))) | m.s("b"),
    "locked chord | locked chord": lambda m: (
        m.lock(chord([m.s("A1"), m.s("A2")], m.j("Aj")))
        | m.lock(chord([m.s("B1"), m.s("B2")], m.j("Bj")))
    ),
    "chain of groups, the first locked": lambda m: chain(
        m.lock(group(m.s("A1"), m.s("A2"))), m.j("b"), group(m.s("c"), m.s("d"))
    ),
    "chain that begins with a locked group of one": lambda m: chain(
        m.lock(group([m.s("A1")])), m.s("b")
    ),
    "locked group behind a chord": lambda m: chain(
        group(m.s("a"), m.s("b")), m.j("c"), m.lock(group(m.s("D1"), m.s("D2")))
    ),
    "middle of a chain": lambda m: chain(m.s("a"), m.lock(chain(m.s("B1"), m.s("B2"))), m.s("c")),
    "chord": lambda m: m.lock(chord([m.s("A1"), m.s("A2")], m.j("Aj"))),
    "chord of none": lambda m: m.lock(chord([], m.j("Aj"))),
    "chord of locked members": lambda m: chord(
        [m.lock(m.s("A")), m.lock(chain(m.s("B1"), m.s("B2"))), m.s("c")], m.j("x")
    ),
    "chord with a locked group in its header": lambda m: chord(
        [m.lock(group(m.s("A1"), m.s("A2"))), m.s("b")], m.j("x")
    ),
    "chord with a locked group of one in its header": lambda m: chord(
        [m.lock(group([m.s("A1")])), m.s("b")], m.j("x")
    ),
    "chord with a locked chord in its header": lambda m: chord(
        [m.lock(chord([m.s("A1"), m.s("A2")], m.j("Aj"))), m.s("b")], m.j("x")
    ),
    "chord with a locked group of chains in its header": lambda m: chord(
        [m.lock(group(chain(m.s("A1"), m.s("A2")), chain(m.s("A3"), m.s("A4")))), m.s("b")],
        m.j("x"),
    ),
    "chord with a locked chain that ends in a group in its header": lambda m: chord(
        [m.lock(chain(m.s("A1"), group(m.s("A2"), m.s("A3")))), m.s("b")], m.j("x")
    ),
    "chord with a locked body": lambda m: chord([m.s("a"), m.s("b")], m.lock(m.j("C"))),
    "chord with a locked chain for a body": lambda m: chord(
        [m.s("a"), m.s("b")], m.lock(chain(m.j("C1"), m.s("C2")))
    ),
    "chord with a locked group for a body": lambda m: chord(
        [m.s("a"), m.s("b")], m.lock(group(m.j("C1"), m.j("C2")))
    ),
    "chord with a locked chord for a body": lambda m: chord(
        [m.s("a"), m.s("b")], m.lock(chord([m.j("C1"), m.j("C2")], m.j("Cj")))
    ),
    "chain of chords": lambda m: m.lock(
        chain(group(m.s("A1"), m.s("A2")), m.j("Aj"), group(m.s("A3"), m.s("A4")), m.j("Ai"))
    ),
    "chord in a chain": lambda m: m.lock(
        chain(m.s("A1"), chord([m.s("A2"), m.s("A3")], m.j("Aj")), m.s("A4"))
    ),
    "chord in the body's chain": lambda m: m.lock(
        chord(
            [m.s("A1"), m.s("A2")],
            chain(m.j("Aj"), chord([m.s("A3"), m.s("A4")], m.j("Ai")), m.s("A5")),
        )
    ),
    "three deep": lambda m: m.lock(nested(m, 3)),
    "three deep in a chain": lambda m: chain(m.s("z"), m.lock(nested(m, 3)), m.s("y")),
    "locked in locked": lambda m: m.lock(
        chain(m.s("A1"), m.lock(group(m.s("A2"), m.lock(chain(m.s("A3"), m.s("A4"))))), m.j("A5"))
    ),
    "locked group in a locked group": lambda m: m.lock(
        group(m.lock(group(m.s("A1"), m.s("A2"))), m.s("A3"))
    ),
    "map": lambda m: m.lock(m.module.pair.starmap([(1, 2), (3, 4)])),
    "chunks as a group": lambda m: m.lock(
        m.module.pair.chunks([(1, 2), (3, 4), (5, 6)], 2).group()
    ),
    "chunks as a group | task": lambda m: (
        m.lock(m.module.pair.chunks([(1, 2)], 2).group()) | m.j("x")
    ),
}
