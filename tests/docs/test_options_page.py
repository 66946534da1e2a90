"""docs/options.md has what `celery_relock.options` has."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from celery_relock.options import CALL_OPTIONS, OPTION_NAMES, LockOptions
from tests.docs.pages import text

SECTIONS = dict(re.findall(r"^### `lock_(\w+)`\n(.*?)(?=^##|\Z)", text("options"), re.M | re.S))
OPTIONS = [each for each in fields(LockOptions) if each.name in OPTION_NAMES]


def test_every_option_has_a_section_and_no_other_name_has_one() -> None:
    assert sorted(SECTIONS) == sorted(OPTION_NAMES)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_section_says_the_default_and_every_value(option: Any) -> None:
    section = SECTIONS[option.name]
    default = f'"{option.default}"' if isinstance(option.default, str) else option.default
    shown = f"{default:g}" if isinstance(default, float) else default
    assert f"- Default: `{shown}`. For the whole app: `relock_{option.name}`.\n" in section
    allowed = option.metadata["allowed"]
    listed = re.findall(r"^    - (.+?): ", section, re.M)
    if listed:
        assert ("None" in allowed) == ("`None`" in listed)
    else:
        assert f"- Values: {allowed}.\n" in section
    for word in re.findall(r"'(\w+)'", allowed):
        assert f'`"{word}"`' in listed
    for kind in ("a callable", "a list", "a dict"):
        assert (kind in allowed) == any(each.startswith(kind) for each in listed)


@pytest.mark.parametrize("option", OPTION_NAMES)
def test_a_section_shows_the_option(option: str) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", SECTIONS[option], re.M | re.S)
    assert f"lock_{option}=" in example


def test_the_page_names_what_a_single_call_can_have() -> None:
    names = ", ".join(f"`lock_{name}`" for name in CALL_OPTIONS)
    assert f"A call can have {names}." in text("options")
