"""Each command that a page shows is typed by a test, or named with a reason in `NOT_TYPED`."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from importlib.util import find_spec

import click
import pytest

from celery_relock.cli import relock
from tests.docs.pages import NOT_TYPED, all_pages, sessions, text, typed_on
from tests.support.worker import ROOT

# Who types the commands of a page. Each takes them from `typed_on` and types all, or fails.
TYPED_BY = {
    "README": "tests/docs/test_quickstart.py",
    "quickstart": "tests/docs/test_quickstart.py",
    "operations": "tests/docs/test_operations_page.py",
    "doctor": "tests/docs/test_operations_page.py",
    "examples/README": "tests/examples/test_examples.py",
}
PAGES = [*all_pages(), "examples/README", "docker/README", "benchmarks/README", "lua/README"]
# Of measurements, which no test repeats: indented, or in a sentence.
MEASUREMENT = re.compile(r"(?:^ {4}|`)((?:python -m |scripts/)[\w./-]+(?: [^`\n]*)?)", re.MULTILINE)
MEASUREMENTS = sorted({found for page in PAGES for found in MEASUREMENT.findall(text(page))})


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_are_typed_by_a_test(page: str) -> None:
    if typed_on(page) and not page.startswith("recipes/"):  # test_recipes.py types all of them
        test = (ROOT / TYPED_BY[page]).read_text()
        assert f'typed_on("{page}")' in test


@pytest.mark.parametrize("page", PAGES)
def test_each_block_says_what_it_is(page: str) -> None:
    """A block without a language, or of another one, is run by nobody."""
    begun = re.findall(r"^ *```(.*)$", text(page), flags=re.MULTILINE)[::2]

    assert set(begun) <= {"python", "console", "sql", "text"} | {
        each for each in begun if each.startswith("{")
    }


def test_each_command_that_is_not_typed_is_on_a_page() -> None:
    commands = [command for page in PAGES for command, _ in sessions(page)]

    for pattern in NOT_TYPED:
        assert any(re.fullmatch(pattern, command) for command in commands), pattern


@pytest.mark.parametrize("command", MEASUREMENTS)
def test_a_measurement_can_be_started_as_its_page_shows(command: str) -> None:
    """Its program is there, and knows the arguments."""
    program, *arguments = shlex.split(command)
    if program == "python":
        module, *arguments = arguments[1:]
    else:
        module = "".join(re.findall(r'-m ([\w.]+) "\$@"', (ROOT / program).read_text()))
    if module:  # the others pass on the arguments of another program
        found = find_spec(module)
        assert found
        module = f"{module}.__main__" if found.submodule_search_locations else module
        if module == "benchmarks.__main__" or re.search(" --[a-z]", command):
            assert import_module(module).main.make_context(command, arguments)


def test_the_page_of_the_command_line_has_all_commands() -> None:
    shown = re.search(r":commands: (.+)", text("cli"))

    assert shown
    assert shown[1].split(", ") == relock.list_commands(click.Context(relock))
