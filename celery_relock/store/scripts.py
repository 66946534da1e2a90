"""The Lua scripts: read from `lua/`, their headers parsed, run by SHA.

The grammar of a header is in `lua/README.md`. A test holds every header against the Python call,
because a header that nothing checks goes wrong (BullMQ and throttled-py each ship one that does).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_LINE = re.compile(
    r"^-- (?:(?P<kind>KEYS|ARGV)\[(?P<index>\d+)(?P<group>\.\.)?\] "
    r"(?P<label>[\w, ]+?): (?P<text>.+)"
    r"|Reply (?P<reply>\{.*\}): (?P<meaning>.+)"
    r"|Keeps: (?P<keeps>.+)"
    r"|(?P<name>[\w/]+): (?P<sentence>.+))$"
)
_USES = re.compile(r"^-- Uses: (?P<parts>.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One line of a header: `index` as written, `repeats` where the line stands for a group."""

    index: int
    label: str
    text: str
    repeats: bool


@dataclass(frozen=True, slots=True)
class Script:
    """A verb: its header, and the source that the server runs, its fragments put in. `call` is how
    every call of it begins on the wire."""

    name: str
    sentence: str
    keys: tuple[Parameter, ...]
    arguments: tuple[Parameter, ...]
    replies: tuple[str, ...]
    keeps: str
    uses: tuple[str, ...]
    body: str
    source: str
    sha: str
    call: str

    @property
    def finds_keys(self) -> bool:
        """Whether it uses keys that its call does not name."""
        return "lib/queue" in self.uses


def parse(name: str, text: str, fragments: Mapping[str, str]) -> Script:
    """Read one script.

    Raises:
        ValueError: a line of the header is not in the grammar, or a part of it is missing.
    """
    found: dict[str, list[Parameter]] = {"KEYS": [], "ARGV": []}
    replies: list[str] = []
    sentence = keeps = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("--") or _USES.match(line):
            break
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"{name}.lua:{number}: not a header line: {line}")
        if kind := match["kind"]:
            parameter = Parameter(
                int(match["index"]), match["label"], match["text"], bool(match["group"])
            )
            found[kind].append(parameter)
        elif match["reply"]:
            replies.append(match["reply"])
        elif match["keeps"]:
            keeps = match["keeps"]
        elif match["name"] == name and number == 1:
            sentence = match["sentence"]
        else:
            raise ValueError(f"{name}.lua:{number}: not a header line: {line}")
    if not (sentence and keeps and found["KEYS"] and replies):
        raise ValueError(f"{name}.lua: the header lacks its sentence, KEYS, Reply or Keeps")
    uses = tuple(part for used in _USES.finditer(text) for part in _parts(used))
    source = _USES.sub(lambda used: "\n".join(fragments[part] for part in _parts(used)), text)
    sha = hashlib.sha1(source.encode()).hexdigest()
    return Script(
        name=name,
        sentence=sentence,
        keys=tuple(found["KEYS"]),
        arguments=tuple(found["ARGV"]),
        replies=tuple(replies),
        keeps=keeps,
        uses=uses,
        body=text,
        source=source,
        sha=sha,
        call=_call(sha),
    )


def _parts(used: re.Match[str]) -> list[str]:
    return [part.strip() for part in used["parts"].split(",")]


def _call(sha: str) -> str:
    return f"$7\r\nEVALSHA\r\n$40\r\n{sha}\r\n"


def _read(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.lua"))}


@cache
def scripts() -> Mapping[str, Script]:
    """Every verb by name, read once per process."""
    folder = Path(__file__).parent.parent / "lua"
    fragments = {f"lib/{name}": text for name, text in _read(folder / "lib").items()}
    return {name: parse(name, text, fragments) for name, text in _read(folder).items()}


@cache
def with_replicas() -> Mapping[str, Script]:
    """The same where the master moves."""
    return _variant("sentinel")


@cache
def sharded() -> Mapping[str, Script]:
    """The same for a cluster: the last key of one that `finds_keys` is there to be absent."""
    return _variant("cluster")


def _variant(where: str) -> Mapping[str, Script]:
    folder = Path(__file__).parent.parent / "lua"
    fragments = {f"lib/{name}": text for name, text in _read(folder / "lib").items()}
    fragments["lib/publish"] = fragments[f"lib/publish_{where}"]
    return {name: parse(name, text, fragments) for name, text in _read(folder).items()}
