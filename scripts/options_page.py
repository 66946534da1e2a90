"""Write docs/options.md, the reference of all options, from `celery_relock.options`.

    python -m scripts.options_page

The tests compare the page with the output of this script.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from celery_relock.options import CALL_OPTIONS, OPTION_NAMES, LockOptions

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
COMMON = ("key", "on_conflict", "max_wait", "ttl", "dedup")
HEAD = """\
# Options

<!-- Written by `python -m scripts.options_page` from celery_relock/options.py. -->

Give options to a task, `@app.task(base=LockedTask, lock_key=…)`, or write them as attributes of a
task class. Each option is checked when the task is declared. A misspelt option is an error that
names the right one.

Every `lock_…` option has a default for all tasks of the app: the [setting](settings.md) `relock_…`.

A single call can have options of its own: `charge.apply_async((42, 5), lock_max_wait=5)`, or
`charge.s(42, 5).set(lock_max_wait=5)` in a canvas. They travel in the message, through waits and
retries. A call can have {}. It cannot have the other options: they belong to the task, because all
calls of a lock name must agree on them. What `map()`, `starmap()` and `chunks()` send calls the
task directly, so options of these calls are not used, and a warning says so.

A default for the app gives way where it contradicts what a task says itself: with
`relock_order = "sent"`, a task with `lock_limit=3` or `lock_key=False` has no order. `locked()` has
the defaults of those options that it takes.
"""


def page() -> str:
    declared = {each.name: each for each in fields(LockOptions)}
    others = [name for name in OPTION_NAMES if name not in COMMON]
    calls = ", ".join(f"`lock_{name}`" for name in CALL_OPTIONS)
    parts = [HEAD.format(calls), "## The five common options\n"]
    for name in (*COMMON, *others):
        if name == others[0]:
            parts.append("## The other options\n")
        parts.append(_section(name, declared[name].default, declared[name].metadata))
    return "\n".join(parts)


def _section(name: str, default: object, says: object) -> str:
    says = dict(says)  # type: ignore[call-overload]
    written = (
        f'"{default}"'
        if isinstance(default, str)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )
    lines = [f"### `lock_{name}`", "", says["doc"], ""]
    lines += [f"- Default: `{written}`. For the whole app: `relock_{name}`."]
    if says["values"]:
        lines += ["- Values:"]
        lines += [f"    - {_code(value)}: {means}." for value, means in says["values"].items()]
    else:
        lines += [f"- Values: {says['allowed']}."]
    lines += [f"- When to change it: {says['when']}"]
    return "\n".join([*lines, "", "```python", says["example"], "```", ""])


def _code(value: str) -> str:
    return f"`{value}`" if value[0] in "\"'NFT" else value


if __name__ == "__main__":
    PAGE.write_text(page())
