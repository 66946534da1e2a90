"""Lock names, and other texts, as people see them and type them."""

from __future__ import annotations

import re

from ..engine.protocol import LINE

# Before the name of a lock: its order (`lock_order`), which is a lock of an internal name.
_ORDER = "order of "
# What `plain` writes for what is not printable, and errors for a backslash or a quote. Not half of
# a character (`\ud800`), which no lock name has.
_ESCAPE = re.compile(
    r"\\(?:[\\'tnr]|x[0-9a-f]{2}|u(?!d[89a-f])[0-9a-f]{4}|U00(?:0[1-9a-f]|10)[0-9a-f]{4})"
)


def plain(text: str) -> str:
    """A text whose control characters are written out (`\\t`, `\\x1b`), so that no terminal obeys
    them."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def shown(name: str) -> str:
    """A lock name for people: the order of a lock reads `order of …`."""
    of = name.removeprefix(LINE)
    # Beside an escape a backslash is one, too: `typed` has to tell them apart.
    text = of if of.isprintable() else plain(of.replace("\\", r"\\"))
    return text if of == name else f"{_ORDER}{text}"


def typed(name: str, *, is_pattern: bool = False) -> str:
    """The lock name, or pattern, that somebody typed as `shown` shows it, or an error quotes it."""
    if name.startswith(_ORDER):
        name = LINE + name.removeprefix(_ORDER)

    def meant(found: re.Match[str]) -> str:
        if is_pattern and found[0] == r"\\":  # it is one in a pattern, too
            return found[0]
        return found[0].encode().decode("unicode_escape")

    return _ESCAPE.sub(meant, name)
