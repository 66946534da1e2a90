"""The Lua scripts: read from `lua/`, joined with their shared parts, run by SHA.

`lua/README.md` has the grammar of their headers. A test compares each header with the Python call.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[2] / "lua"
# As all that use lib/queue, these make keys from those of their calls.
_FIND_KEYS = ("place", "survey", "where")
_USES = re.compile(r"^-- Uses: (?P<parts>.+)$", re.MULTILINE)
_MODULE = re.compile(r"^return (?P<name>[A-Z]\w+)\n\Z", re.MULTILINE)


class Script(NamedTuple):
    """A verb.

    Attributes:
        finds_keys: whether it uses keys that its call does not name.
        tells_first: whether those whom it tells of something hear of it before its caller does.
    """

    name: str
    source: str
    sha: str
    finds_keys: bool
    tells_first: bool = False


@cache
def scripts(variant: str = "server") -> Mapping[str, Script]:
    """Every verb by name, read once in a process.

    Args:
        variant: `server` or `cluster`. They differ in how they publish a message and find out
            whether somebody listens (`lib/publish*.lua`).
    """
    parts = {f"lib/{path.stem}": _part(path) for path in FOLDER.glob("lib/*.lua")}
    if variant != "server":
        parts["lib/publish"] = parts[f"lib/publish_{variant}"]
    return {path.stem: _script(path, parts) for path in sorted(FOLDER.glob("*.lua"))}


def uses(text: str) -> list[str]:
    """The shared parts that a script uses, in their order."""
    return [part.strip() for line in _USES.finditer(text) for part in line["parts"].split(",")]


def _part(path: Path) -> str:
    """A shared part as a script contains it: one that returns a table is a module."""
    text = path.read_text("utf-8")
    found = _MODULE.search(text)
    return f"local {found['name']} = module(function()\n{text}end)\n" if found else text


def _script(path: Path, parts: Mapping[str, str]) -> Script:
    text = path.read_text("utf-8")
    source = _USES.sub(lambda line: "\n".join(parts[part] for part in uses(line[0])), text)
    sha = hashlib.sha1(source.encode()).hexdigest()
    return Script(path.stem, source, sha, "lib/queue" in uses(text) or path.stem in _FIND_KEYS)
