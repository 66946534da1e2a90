"""lua/README.md names every place in the scripts where a kind of key is written or removed."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.support.worker import ROOT

LUA = ROOT / "lua"
# How the scripts call keys, where that is not the name of the kind; of kinds that are written
# together, the first.
KINDS = {"key": "l", "first": "l", "queue": "q", "waiters": "q", "messages": "m", "parked": "m"}
KINDS |= {"ends": "e", "fences": "e", "owners": "e", "tombstone": "d", "due_at": "due"}
KINDS |= {"noted": "s", "notes": "s"}
COMMAND = re.compile(
    r"redis\.p?call\(\s*'(?:(?P<writes>HSET|ZADD|SET|HINCRBY)|HDEL|ZREM|DEL|ZREMRANGEBYSCORE)', "
    # By its name, or with a prefix before it. Neither key nor field is the `-` that never exists.
    r"(?:[\w.]*?(?P<name>\w+)|[\w.]+ \.\. '(?P<kind>\w+).*?)[,()](?! '-')"
)
FUNCTION = re.compile(r"^(?:local )?function ([\w.]+)\(.*?^end$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(\w+):?`(?:, `\w+:?`)* \| (.*) \| (.*) \|$", re.MULTILINE)


def of_the_code() -> dict[str, list[set[str]]]:
    """By kind of key, who writes and who removes some: verbs, and functions that others call."""
    found: dict[str, list[set[str]]] = defaultdict(lambda: [set(), set()])
    for path in LUA.rglob("*.lua"):
        code = re.sub(r"--.*", "", path.read_text("utf-8"))
        bodies = {each[1]: each[0] for each in FUNCTION.finditer(code)}
        for name, body in bodies.items() if path.parent != LUA else [(path.stem, code)]:
            if name == path.stem or "." in name:
                for command in COMMAND.finditer(_with_locals(body, bodies)):
                    called = command["name"] or command["kind"]
                    found[KINDS.get(called, called)][not command["writes"]].add(name)
    return found


def _with_locals(body: str, bodies: dict[str, str]) -> str:
    """A function, and all that it reaches in its file without leaving it."""
    seen, left = "", [body]
    while left:
        seen += (text := left.pop())
        names = (name for name in bodies if "." not in name and re.search(rf"\b{name}\b", text))
        left += [bodies[name] for name in names if bodies[name] not in seen]
    return seen


def of_the_page() -> dict[str, list[set[str]]]:
    text = (LUA / "README.md").read_text("utf-8").partition("| key | written by")[2]
    rows = ROW.findall(text.partition("\n\n")[0])
    return {kind: [set(re.findall(r"`([\w.]+)`", cell)) for cell in cells] for kind, *cells in rows}


def test_the_page_of_the_scripts_names_all_who_write_or_remove_a_key() -> None:
    assert of_the_page() == of_the_code()
