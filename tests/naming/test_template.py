"""Lock name templates: what they read, what they refuse, and how values look in a name."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import uuid
from collections import OrderedDict
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import pydantic
import pytest
from kombu.utils import json

from celery_relock.errors import LockConfigError
from celery_relock.naming.template import Template


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Order(pydantic.BaseModel):
    id: uuid.UUID
    items: list[int] = []

    @property
    def label(self) -> str:
        return f"order {self.id}"


@dataclasses.dataclass
class Row:
    owner: str

    @property
    def upper(self) -> str:
        return self.owner.upper()


ID = uuid.UUID("0f8fad5b-d9cb-469f-a165-70867728950e")


def render(source: str, **arguments: Any) -> str:
    return Template(source, "proj.task").render(arguments)


@pytest.mark.parametrize(
    ("source", "arguments", "name"),
    [
        ("account:{account_id}", {"account_id": 42}, "account:42"),
        ("{a}-{b}-{a}", {"a": 1, "b": "x"}, "1-x-1"),
        ("the one lock", {}, "the one lock"),
        ("{{{a}}}", {"a": 1}, "{1}"),
        ("{rows[0]}", {"rows": ["x"]}, "x"),
        ("{rows[1][2]}", {"rows": (1, [1, 2, 3])}, "3"),
        ("{rows[0].owner}", {"rows": [{"owner": "ann"}]}, "ann"),
        ("{d[key]}", {"d": {"key": 5}}, "5"),
        ("{d[two words]}", {"d": {"two words": 5}}, "5"),
        ("{d[7]}", {"d": {7: "seven"}}, "seven"),
        ("{d[7]}", {"d": {"7": "seven"}}, "seven"),
        ("{d[_id]}", {"d": {"_id": 8}}, "8"),
        ("{d.key}", {"d": {"key": 5}}, "5"),
        ("{d.items}", {"d": {"items": 5}}, "5"),
        ("{order.items[0]}", {"order": Order(id=ID, items=[4])}, "4"),
        ("{order.id}", {"order": Order(id=ID)}, str(ID)),
        ("{order[id]}", {"order": Order(id=ID)}, str(ID)),
        ("{order.label}", {"order": Order(id=ID)}, f"order {ID}"),
        ("{row.owner}", {"row": Row("ann")}, "ann"),
        ("{row[owner]}", {"row": Row("ann")}, "ann"),
        ("{row.upper}", {"row": Row("ann")}, "ANN"),
        ("{iban[0]}", {"iban": "DE12"}, "D"),
        ("{amount:.2f}", {"amount": Decimal("3.14159")}, "3.14"),
        ("{amount:.2f}", {"amount": 3}, "3.00"),
        ("{n:05d}", {"n": 42}, "00042"),
        ("{day:%Y-%m}", {"day": date(2026, 3, 4)}, "2026-03"),
        ("{at:%H:%M}", {"at": datetime(2026, 3, 4, 5, 6)}, "05:06"),
        ("{id!s:.8}", {"id": ID}, "0f8fad5b"),
        ("{id:>40}", {"id": ID}, f"    {ID}"),
        ("{n!s:>4}", {"n": 42}, "  42"),
    ],
)
def test_a_template_renders(source: str, arguments: dict[str, Any], name: str) -> None:
    assert render(source, **arguments) == name


@pytest.mark.parametrize(
    "value",
    [42, -1, "x", "", 1.5, True, ID, Decimal("1.10"), date(2026, 1, 1), datetime(2026, 1, 1, 2, 3)],
)
def test_a_plain_value_looks_as_in_an_f_string(value: object) -> None:
    assert render("x:{value}", value=value) == f"x:{value}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Colour.RED, "red"),
        (Level.HIGH, "3"),
        ("zoë".encode(), "zoë"),
        (b"\xff\x00", "ff00"),
        ([1, "a"], '[1,"a"]'),
        ((1, "a"), '[1,"a"]'),
        ({3, 1}, "set[1,3]"),
        (OrderedDict(b=1, a=None), '{"a":null,"b":1}'),
        (Row("ann"), '{"owner":"ann"}'),
        (ipaddress.ip_address("10.0.0.1"), "10.0.0.1"),
        (timedelta(hours=1), "1:00:00"),
    ],
)
def test_a_rich_value_has_one_form(value: object, shown: str) -> None:
    assert render("{value}", value=value) == shown


@pytest.mark.parametrize("source", ["{value}", "{value!s}", "{value!s:>60}"])
@pytest.mark.parametrize(
    "value",
    [
        ID,
        Decimal("1E+2"),
        datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2026, 1, 1, tzinfo=timezone.utc),
        date(2026, 1, 1),
        Level.HIGH,
        b"abc",
        b"\xff",
        (1, (2, 3)),
        {1: {None: 2}},
    ],
)
def test_a_value_looks_the_same_after_the_message(source: str, value: object) -> None:
    assert render(source, value=json.loads(json.dumps(value))) == render(source, value=value)


def test_the_zone_of_a_datetime_is_its_offset_as_in_the_worker() -> None:
    inline = datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))

    assert render("{at:%Z}", at=inline) == "UTC+01:00"
    assert render("{at:%Z}", at=json.loads(json.dumps(inline))) == "UTC+01:00"


@pytest.mark.parametrize(
    "value", ["{b}", "{", "}}", "{0.__class__}", "a:b", "two words", "zoë", "{{}}", "%s", "a}{b"]
)
def test_values_are_inert(value: str) -> None:
    assert render("x:{a}:{b}", a=value, b=1) == f"x:{value}:1"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{}", "must name an argument"),
        ("{0}", "must name an argument"),
        ("{0.id}", "must name an argument"),
        ("{.id}", "must name an argument"),
        ("{a b}", "must name an argument"),
        ("{a", "written twice"),
        ("a}", "written twice"),
        ("{a.__class__}", "private attribute '__class__'"),
        ("{a.b._id}", r"private attribute '_id'.*write \[_id\]"),
        ("{a[0].__dict__}", "private attribute"),
        ("{a.}", "not an attribute name"),
        ("{a.b c}", "not an attribute name"),
        ("{a[]}", "empty brackets"),
        ("{a[0]b}", "is not of the form"),
        ("{a]}", "is not of the form"),
        ("{a!r}", "conversion !r"),
        ("{a!a}", "conversion !a"),
        ("{a:{b}}", "inside its format spec"),
    ],
)
def test_a_template_that_cannot_work_is_refused_when_it_is_declared(source: str, says: str) -> None:
    with pytest.raises(LockConfigError, match=says):
        Template(source, "proj.t")


def test_an_unknown_argument_is_refused_with_the_closest_one() -> None:
    template = Template("account:{acount_id}", "proj.t")

    with pytest.raises(LockConfigError, match=r"proj\.t.*'acount_id'.*mean 'account_id'\?.*force"):
        template.check(["account_id", "force"])
    with pytest.raises(LockConfigError, match="It takes: no arguments"):
        template.check([])
    Template("{account_id}:{force.x}", "proj.t").check(["account_id", "force"])


@pytest.mark.parametrize(
    ("source", "value", "says"),
    [
        ("{x}", None, "is None.*callable"),
        ("{x[a]}", {"a": None}, "is None"),
        ("{x.name}", {"id": 1}, r"\{x\.name\} is missing: x \(dict\) has no \.name"),
        ("{x.name}", Row("a"), r"x \(Row\) has no \.name"),
        ("{x[5]}", [1], r"x \(list\) has no \[5\]"),
        ("{x[-1]}", [1], r"has no \[-1\]"),
        ("{x[a]}", [1], r"has no \[a\]"),
        ("{x[a]}", 5, r"x \(int\) has no \[a\]"),
        ("{x[0].y.z}", [{"y": {}}], r"x\[0\]\.y \(dict\) has no \.z"),
        ("{x[__class__]}", {}, r"has no \[__class__\]"),
        ("{x[__class__]}", Row("a"), r"has no \[__class__\]"),
        ("{x.keys}", {"a": 1}, r"has no \.keys"),
        ("{x.upper}", "text", r"has no \.upper"),
        ("{x}", object(), r"\{x\} \(object\) has no form that is the same"),
        ("{x}", [{"a": object()}], r"\{x\}\[0\]\.a \(object\) has no form"),
        ("{x}", lambda: 1, "has no form"),
        ("{x.dump}", type("Thing", (), {"dump": lambda self: 1})(), "has no form"),
        ("{x:.2f}", "text", r"\(str\) does not take the format '\.2f'"),
        ("{x:d}", Decimal(1), "does not take the format"),
    ],
)
def test_a_call_without_a_value_to_lock_on_is_refused(source: str, value: Any, says: str) -> None:
    with pytest.raises(LockConfigError, match=f"proj.task.*{says}"):
        render(source, x=value)


def test_a_missing_argument_is_told() -> None:
    with pytest.raises(LockConfigError, match="this call has no argument 'x'"):
        render("{x}")


def test_a_property_that_fails_is_our_error_with_its_cause() -> None:
    class Lazy:
        @property
        def id(self) -> int:
            raise RuntimeError("no database")

    with pytest.raises(LockConfigError, match=r"\{x\.id\} could not be read.*no database"):
        render("{x.id}", x=Lazy())


def test_a_list_that_contains_itself_is_refused() -> None:
    rows: list[Any] = []
    rows.append(rows)

    with pytest.raises(LockConfigError, match=r"\{x\}\[0\] \(list\) contains itself"):
        render("{x}", x=rows)
