"""Raw arguments and the ones that went through kombu's JSON give one default lock name."""

from __future__ import annotations

import enum
import inspect
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.utils import json

from celery_relock.naming.names import NameRule


class Text(str, enum.Enum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


def body(first: Any, second: Any = None, *rest: Any, **more: Any) -> None:
    """Some task."""


SIGNATURE = inspect.signature(body)
RULE = NameRule.compile(None, "proj.task", SIGNATURE)
TEMPLATE = NameRule.compile("x:{first}", "proj.task", SIGNATURE)

keys = st.one_of(
    st.text(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(),
    st.sampled_from([*Text, *Number]),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.binary(),
    st.uuids(),
    st.decimals(),
    st.datetimes(timezones=st.none() | st.timezones()),
    st.dates(),
    st.times(timezones=st.none() | st.timezones()),
    st.sampled_from([*Text, *Number]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def name(rule: NameRule, args: Any, kwargs: Any) -> tuple[str, ...]:
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return rule.names(bound.arguments)


def sent(value: Any) -> Any:
    return json.loads(json.dumps(value))


@settings(max_examples=400)
@given(
    args=st.lists(values, min_size=1, max_size=4),
    kwargs=st.dictionaries(st.sampled_from(["alpha", "beta"]), values),
)
def test_the_default_name_is_the_same_before_and_after_the_message(args: Any, kwargs: Any) -> None:
    assert name(RULE, args, kwargs) == name(RULE, sent(args), sent(kwargs))


@settings(max_examples=300)
@given(values.filter(lambda value: value is not None))
def test_a_rendered_value_is_the_same_before_and_after_the_message(value: Any) -> None:
    def rendered(first: Any) -> Any:
        try:
            return name(TEMPLATE, [first], {})
        except Exception as error:  # a control character is refused on both sides
            return type(error), str(error)

    assert rendered(value) == rendered(sent(value))


# Few values, so that two structures are often equal, or differ in a type alone.
alike = st.recursive(
    st.sampled_from(
        [None, 0, 1, True, False, 1.0, "0", "1", "true", "a", b"1", Text.A, Number.ONE]
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from([1, "1", True, "true", None, "a", Text.A]), inner),
    ),
    max_leaves=4,
)


@settings(max_examples=1000)
@given(alike, alike)
def test_two_values_share_a_name_only_if_they_arrive_as_one(one: Any, other: Any) -> None:
    same = name(RULE, [one], {}) == name(RULE, [other], {})

    def arrived(value: Any) -> str:
        return json.dumps(sent(value), default_kwargs={"sort_keys": True})

    assert same == (arrived(one) == arrived(other))
