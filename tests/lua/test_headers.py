"""Every Lua file says in its header what it takes and answers, and its code does just that.

tests/lua/test_calls.py holds the headers against the calls that the backend really sends.
"""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from tests.support.lua_headers import Header as Script
from tests.support.lua_headers import Parameter, parse
from tests.support.lua_headers import headers as scripts
from tests.support.worker import ROOT

LUA = ROOT / "lua"
VERBS = sorted(path.stem for path in LUA.glob("*.lua"))
FRAGMENTS = {f"lib/{path.stem}": path.read_text() for path in (LUA / "lib").glob("*.lua")}
UNITS = {
    *("id", "ids with spaces between", "ms", "count", "number", "text", "1 or 0"),
    *("hash", "string", "sorted set"),
}
# In an array, or first in a line.
A_TAG = r"(?:\{ *(?:ok = )?|string\.format\()'([A-Z]+)\b"


def _code(text: str) -> str:
    """Without comments, and without the parts that `-- Uses:` puts in."""
    return re.sub(r"--.*", "", text)


@pytest.mark.parametrize("verb", VERBS)
class TestTheHeaderAndTheCode:
    @pytest.fixture
    def script(self, verb: str) -> Script:
        return scripts()[verb]

    def test_its_sentence_is_one_sentence(self, script):
        assert re.fullmatch(r"[A-Z][^.]*\.", script.sentence)

    def test_its_parameters_count_from_one_without_a_gap(self, script):
        for parameters in (script.keys, script.arguments):
            index = word = 0
            for one in parameters:
                index, word = (index, word + 1) if one.word > 1 else (index + 1, min(one.word, 1))
                assert (one.index, one.word) == (index, word)
            for one, after in pairwise(parameters):
                assert not one.repeats or (one.word and after.index > one.index)

    def test_every_parameter_has_a_known_type_or_unit_and_a_meaning(self, script):
        for one in (*script.keys, *script.arguments):
            units = [unit for unit in UNITS if re.match(rf"{re.escape(unit)}[,;] \S", one.text)]
            assert units, one

    def test_every_parameter_is_bound_to_a_local_in_the_first_block(self, script):
        first = _code(script.body).strip().split("\n\n")[0]
        for word, parameters in (("KEYS", script.keys), ("ARGV", script.arguments)):
            for one in parameters:
                if one.word:
                    assert _bound(first, f"{word}[{one.index}]"), one
                    words = [each for each in parameters if each.index == one.index]
                    names = ", ".join(each.label for each in words if not each.repeats)
                    assert re.search(rf"^local {names}\b.*=\s+string\.match\(", first, re.M), one
                elif one.repeats:
                    assert re.search(rf"= .*\b{word}\b(?!\[)", first), one
                else:
                    assert _bound(first, f"{word}[{one.index}]"), one
            read = {int(index) for index in re.findall(rf"{word}\[(\d+)\]", first)}
            assert read <= {one.index for one in parameters}

    def test_it_reads_keys_and_arguments_in_the_first_block_alone(self, script):
        code = re.sub(r"^(local [^\n]+\n)+", "", _code(script.body).lstrip())

        assert not re.search(r"\b(KEYS|ARGV)\b", code)

    def test_the_replies_of_the_code_and_of_the_header_are_the_same(self, script):
        assert set(re.findall(A_TAG, _code(script.body))) == script.tags

    def test_it_uses_fragments_that_are_there_and_none_in_vain(self, script):
        code, needed = _code(script.body), set()
        names = {
            name: _table(text)
            for name, text in FRAGMENTS.items()
            if not name.startswith("lib/publish_")  # what stands for lib/publish elsewhere
        }
        while more := {
            name for name, table in names.items() if name not in needed and table in code
        }:
            needed |= more
            code += "".join(_code(FRAGMENTS[name]) for name in more)
        if needed - {"lib/publish"}:
            needed.add("lib/module")

        assert set(script.uses) == needed


def _bound(block: str, value: str) -> str | None:
    """The local that a value is bound to: `local a, b = KEYS[1], tonumber(ARGV[2])`."""
    for names, values in re.findall(r"^local ([\w, ]+) = (.+)$", block, re.MULTILINE):
        for name, each in zip(names.split(", "), values.split(", "), strict=False):
            if value in each:
                return name
    return None


def _table(fragment: str) -> str:
    """How a fragment is used."""
    (name,) = re.findall(r"^local (\w+) = \{\}$", fragment, re.MULTILINE) or [""]
    return f"{name}." if name else "publish("


@pytest.mark.parametrize("name", sorted(FRAGMENTS))
def test_a_fragment_says_what_it_is_and_knows_no_keys_or_arguments(name):
    assert re.match(rf"-- {name}: \w.+\.\n\n(-- .+\n)*local", FRAGMENTS[name])
    code = _code(FRAGMENTS[name]).replace("KEYS[#KEYS] = nil", "")
    assert not re.search(r"\b(KEYS|ARGV)\b", code)
    used = name.partition("_")[0]
    assert any(used in script.uses for script in scripts().values())


def test_a_function_that_the_page_of_the_scripts_names_is_in_a_fragment():
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", (LUA / "README.md").read_text("utf-8")))
    functions = re.compile(r"^function ([A-Z]\w+\.\w+)", re.MULTILINE)

    assert len(named) > 10
    assert named <= {name for text in FRAGMENTS.values() for name in functions.findall(text)}


GOOD = """\
-- verb: Do it.
-- KEYS[1] lock: hash, the holds
-- Reply {OK}: done
-- Keeps: order
-- Uses: lib/part

return { 'OK' }
"""


def test_the_parser_reads_a_header():
    script = parse("verb", GOOD)

    assert (script.name, script.sentence, script.keeps) == ("verb", "Do it.", "order")
    assert script.keys == (Parameter(1, "lock", "hash, the holds", False),)
    assert (script.replies, script.uses, script.arguments) == (("{OK}",), ("lib/part",), ())


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("-- verb: Do it.", "-- another: Do it."),
        ("-- verb: Do it.", "-- Do it."),
        ("-- KEYS[1] lock: hash, the holds", "-- KEYS lock: hash, the holds"),
        ("-- KEYS[1] lock: hash, the holds\n", ""),
        ("-- Reply {OK}: done", "-- Reply OK: done"),
        ("-- Reply {OK}: done\n", ""),
        ("-- Keeps: order\n", ""),
        ("-- Keeps: order", "-- Keeps order"),
    ],
)
def test_the_parser_refuses_a_header_that_is_not_in_the_grammar(line, other):
    with pytest.raises(ValueError, match=r"^verb\.lua"):
        parse("verb", GOOD.replace(line, other))
