"""The digest of arguments: what it keeps apart, what it makes equal, and what it refuses."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
import uuid
from collections import OrderedDict, UserDict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any
from zoneinfo import ZoneInfo

import pydantic
import pytest
from kombu.utils import json

from celery_relock.errors import LockConfigError
from celery_relock.naming import canonical


class Plain(enum.Enum):
    A = "a"


class Text(str, enum.Enum):
    A = "a"


class Labelled(str, enum.Enum):
    """The text that JSON writes is not the value."""

    A = ("a", "the first")

    def __new__(cls, text: str, label: str) -> Labelled:
        member = str.__new__(cls, text)
        member._value_ = (text, label)
        return member


class Number(enum.IntEnum):
    ONE = 1


class Order(pydantic.BaseModel):
    id: int
    ref: uuid.UUID = uuid.UUID(int=7)
    lines: tuple[int, ...] = (1, 2)
    due: datetime = datetime(2026, 1, 2, tzinfo=timezone.utc)


@dataclasses.dataclass
class Row:
    owner: Any


Pair = namedtuple("Pair", "a b")


class Shouting(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return "SHOUT"


class FloatLike(float):
    def __repr__(self) -> str:
        return "FloatLike()"


class Own:
    def __json__(self) -> object:
        return {"own": (1, 2)}


class Described:
    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Described({self.number})"


def digest(value: object) -> str:
    return canonical.digest({"x": value}, "proj.task")


APART = [
    1,
    "1",
    True,
    "True",
    "true",
    1.0,
    "1.0",
    Decimal("1"),
    Decimal("1.0"),
    None,
    "None",
    "null",
    [1],
    "[1]",
    [[1]],
    [],
    {},
    {"a": 1},
    {"a": "1"},
    {"a": [1]},
    [{"a": 1}],
    {1},
    b"1",
    uuid.UUID(int=1),
    str(uuid.UUID(int=1)),
    date(2026, 1, 1),
    "2026-01-01",
    datetime(2026, 1, 1),
    datetime(2026, 1, 1, tzinfo=timezone.utc),
    time(1),
    timedelta(1),
    Described(1),
    Described(2),
    "Described(1)",
    math.nan,
    math.inf,
    -math.inf,
    'a","b',
    ["a", "b"],
    "",
    b"",
    10**5000,
    PurePosixPath("/a"),
]


def test_values_that_a_message_keeps_apart_have_different_digests() -> None:
    made = [digest(value) for value in APART]

    assert len(set(made)) == len(APART)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        (Pair(1, (2,)), [1, [2]]),
        (deque([1]), [1]),
        ({1: "a"}, {"1": "a"}),
        ({None: 1, True: 2, 1.5: 3}, {"null": 1, "true": 2, "1.5": 3}),
        ({math.nan: 1, math.inf: 2}, {"NaN": 1, "Infinity": 2}),
        ({"1": "first", 1: "last"}, {"1": "last"}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (OrderedDict(b=2, a=1), {"a": 1, "b": 2}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (UserDict(a=1), {"a": 1}),
        ({0, 8}, {8, 0}),  # these two keep the order in which they came
        ({"a", "b"}, frozenset({"b", "a"})),
        (Plain.A, "a"),
        (Text.A, "a"),
        (Labelled.A, "a"),
        (Number.ONE, 1),
        ({Plain.A: 1, Number.ONE: 2}, {"a": 1, "1": 2}),
        (Shouting("a"), "a"),
        (FloatLike(1.5), 1.5),
        (-0.0, 0.0),
        (math.nan, float("nan")),
        (bytearray(b"\xff"), b"\xff"),
        (memoryview(b"ab"), b"ab"),
        (Row(owner=(1,)), {"owner": [1]}),
        (Order(id=1), Order(id=1).model_dump(mode="json")),
        ([Order(id=1)], [Order(id=1).model_dump(mode="json")]),
        (Own(), {"own": [1, 2]}),
        (
            datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")),
            datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=1))),
        ),
        (datetime(2026, 1, 1, fold=1), datetime(2026, 1, 1)),
        (Described(3), Described(3)),
        ("\ud83d\ude00", "\U0001f600"),
    ],
)
def test_values_that_a_message_makes_equal_have_one_digest(one: object, other: object) -> None:
    assert digest(one) == digest(other)


@pytest.mark.parametrize("value", [b"\xff\x00", b"abc", Decimal("1.10"), date(2026, 1, 1), time(3)])
def test_a_value_that_kombu_restores_has_the_digest_it_left_with(value: object) -> None:
    assert digest(json.loads(json.dumps(value))) == digest(value)


def test_the_names_of_arguments_count() -> None:
    assert canonical.digest({"a": 1, "b": 2}, "t") != canonical.digest({"a": 2, "b": 1}, "t")
    assert canonical.digest({"a": 1, "b": 2}, "t") == canonical.digest({"b": 2, "a": 1}, "t")
    assert canonical.digest({}, "t") != canonical.digest({"": None}, "t")


def generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: 1,
        len,
        "text".upper,
        generator(),
        iter([1]),
        map(str, [1]),
        itertools.count(1),
        math,
    ],
)
def test_a_value_without_stable_form_is_refused_by_name(value: object) -> None:
    with pytest.raises(LockConfigError, match=r"proj\.task.*and x \(.*lock_key"):
        digest(value)


def test_an_open_file_is_refused(tmp_path) -> None:
    with (tmp_path / "f").open("w") as file, pytest.raises(LockConfigError, match="and x "):
        digest(file)


def test_a_description_with_a_memory_address_is_refused() -> None:
    class Address:
        def __repr__(self) -> str:
            return f"Address({id(self)})"

    class Holder:
        def __repr__(self) -> str:
            return f"Holder({object()!r})"

    for value in (Address(), Holder()):
        with pytest.raises(LockConfigError, match="memory address"):
            digest(value)


def test_an_array_whose_description_shows_its_ends_alone_is_refused() -> None:
    """Of NumPy and pandas, say: two of them can have one text."""

    class Array:
        def __len__(self) -> int:
            return 1001

        def __array__(self) -> None: ...

        def __repr__(self) -> str:
            return "array([0, 1, 2, ..., 998, 999, 1000])"

    with pytest.raises(LockConfigError, match="is an array or a table"):
        digest(Array())


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ([{"owner": object()}], r"x\[0\]\.owner "),
        ([1, Row(owner=object())], r"x\[1\]\.owner "),
        ({"two words": [object()]}, r"x\[two words\]\[0\] "),
        ({object(): 1}, r"x\[<object object at .*\] "),
    ],
)
def test_the_error_leads_to_the_value(value: object, path: str) -> None:
    with pytest.raises(LockConfigError, match=path):
        digest(value)


def test_a_structure_that_contains_itself_is_refused() -> None:
    rows: list[Any] = [1]
    rows.append({"rows": rows})
    row = Row(owner=None)
    row.owner = [row]

    with pytest.raises(LockConfigError, match=r"x\[1\]\.rows \(list\) contains itself"):
        digest(rows)
    with pytest.raises(LockConfigError, match=r"x\.owner\[0\] \(Row\) contains itself"):
        digest(row)


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"a": 1}

    assert digest([shared, shared]) == digest([{"a": 1}, {"a": 1}])


def test_a_structure_without_end_is_refused_and_not_a_recursion_error() -> None:
    class Endless:
        def __json__(self) -> object:
            return [Endless()]

    class Same:
        def __json__(self) -> object:
            return Same()

    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]

    with pytest.raises(LockConfigError, match="deeper than 100"):
        digest(Endless())
    with pytest.raises(LockConfigError, match="deeper than 100"):
        digest(deep)
    with pytest.raises(LockConfigError, match="never plain"):
        digest(Same())


def test_code_of_the_value_that_fails_is_our_error_with_its_cause() -> None:
    class BrokenText:
        def __repr__(self) -> str:
            raise KeyError("gone")

    class BrokenForm:
        def __json__(self) -> object:
            raise RuntimeError("no database")

    with pytest.raises(LockConfigError, match=r"cannot be shown: KeyError\('gone'\)"):
        digest(BrokenText())
    with pytest.raises(LockConfigError, match="no database"):
        digest(BrokenForm())
