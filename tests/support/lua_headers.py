"""The headers of the Lua scripts, as `lua/README.md` has their grammar.

They are held against the calls and the code by tests, because a header that nothing checks goes
wrong (BullMQ and throttled-py each ship one that does).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from celery_relock.backends.redis.scripts import FOLDER, scripts, uses

_LINE = re.compile(
    r"^-- (?:(?P<kind>KEYS|ARGV)\[(?P<index>\d+)(?:\.(?P<word>\d+))?(?P<group>\.\.)?\] "
    r"(?P<label>[\w, ]+?): (?P<text>.+)"
    r"|Reply (?P<reply>\{.*\}): (?P<meaning>.+)"
    r"|Keeps: (?P<keeps>.+)"
    r"|(?P<name>[\w/]+): (?P<sentence>.+))$"
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One line of a header: `index` as written, `repeats` where the line stands for a group, `word`
    where it is of one word of an argument; 0 of the whole."""

    index: int
    label: str
    text: str
    repeats: bool
    word: int = 0

    @property
    def is_optional(self) -> bool:
        return "missing" in self.text


@dataclass(frozen=True, slots=True)
class Header:
    """What a script says of itself, and its text below that."""

    name: str
    sentence: str
    keys: tuple[Parameter, ...]
    arguments: tuple[Parameter, ...]
    replies: tuple[str, ...]
    keeps: str
    uses: tuple[str, ...]
    body: str
    source: str

    @property
    def tags(self) -> set[str]:
        """The words of capitals that open a reply."""
        return {tag for reply in self.replies for tag in re.findall(r"\{([A-Z]+)\b", reply)}


def parse(name: str, text: str, source: str = "") -> Header:
    """Read one script.

    Raises:
        ValueError: a line of the header is not in the grammar, or a part of it is missing.
    """
    found: dict[str, list[Parameter]] = {"KEYS": [], "ARGV": []}
    replies: list[str] = []
    sentence = keeps = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("--") or line.startswith("-- Uses: "):
            break
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"{name}.lua:{number}: not a header line: {line}")
        if kind := match["kind"]:
            numbers = int(match["index"]), int(match["word"] or 0)
            told = match["label"], match["text"], bool(match["group"])
            found[kind].append(Parameter(numbers[0], *told, numbers[1]))
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
    parameters = tuple(found["KEYS"]), tuple(found["ARGV"])
    return Header(
        name, sentence, *parameters, tuple(replies), keeps, tuple(uses(text)), text, source
    )


@cache
def headers() -> Mapping[str, Header]:
    """Every verb's, by its name."""
    return {
        name: parse(name, (FOLDER / f"{name}.lua").read_text("utf-8"), script.source)
        for name, script in scripts().items()
    }
