"""Options: each declared once, checked when a task is declared, refused with a way out."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields
from datetime import timedelta
from functools import partial
from typing import Any, get_args, get_type_hints

import pytest

from celery_relock import LockedTask
from celery_relock.engine.protocol import SHARED
from celery_relock.errors import LockConfigError
from celery_relock.options import OPTION_NAMES, LockOptions


def declare(**declared: Any) -> LockOptions:
    return LockOptions.collect(declared, {}, "app.charge")


def refusal(defaults: dict[str, Any] | None = None, **declared: Any) -> str:
    with pytest.raises(LockConfigError) as caught:
        LockOptions.collect(declared, defaults or {}, "app.charge")
    assert "app.charge" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_a_task_class_has_a_type_for_each_option() -> None:
    assert {f"lock_{name}" for name in OPTION_NAMES} == set(LockedTask.__annotations__)


def test_the_mode_is_a_word_a_list_of_words_or_what_a_callable_returns() -> None:
    assert declare(lock_mode="shared").limit_for({}) == SHARED
    assert declare(lock_mode="exclusive").limit_for({}) == 1
    by_arguments = declare(lock_mode=lambda writes: "exclusive" if writes else "shared")
    assert by_arguments.limit_for({"writes": True, "other": 1}) == 1
    assert by_arguments.limit_for({"writes": False}) == SHARED
    each = declare(lock_key=["a", "b"], lock_mode=("shared", "exclusive"))
    assert [each.limit_of_parts(numbers) for numbers in ((0,), (1,), (0, 1))] == [SHARED, 1, 1]
    with pytest.raises(LockConfigError, match=r"lock_mode must return 'exclusive' or 'shared'"):
        declare(lock_mode=lambda: "read").limit_for({})


def test_a_mode_that_means_nothing_is_refused() -> None:
    assert "It takes 'exclusive', 'shared'" in refusal(lock_mode="read")
    assert "It takes 'exclusive', 'shared'" in refusal(lock_key=["a", "b"], lock_mode=["shared", 1])
    assert "2 words for 1 lock names" in refusal(lock_key="a", lock_mode=["shared", "shared"])
    assert "Use one of them" in refusal(lock_limit=5, lock_mode="shared")


def test_every_default_can_be_written_down() -> None:
    written = {f"lock_{name}": getattr(LockOptions(), name) for name in OPTION_NAMES}

    assert declare(**written) == declare()


def test_the_task_goes_before_the_app_and_the_app_before_the_library() -> None:
    options = LockOptions.collect({"lock_ttl": 5}, {"ttl": 7, "max_wait": 9}, "app.charge")

    assert (options.ttl, options.max_wait, options.limit) == (5.0, 9.0, 1)


@pytest.mark.parametrize(
    ("option", "value", "taken"),
    [
        ("ttl", 0.5, 0.5),
        ("ttl", timedelta(minutes=2), 120.0),
        ("ttl", timedelta(days=3650), 315_360_000.0),
        ("max_wait", 0, 0.0),
        ("max_wait", None, None),
        ("max_wait", timedelta(seconds=3), 3.0),
        ("limit", 7, 7),
        ("owner", "task", "task"),
        ("owner", len, len),
        ("key", "account:{account_id}", "account:{account_id}"),
        ("key", ["a:{x}", len], ["a:{x}", len]),
        ("key", False, False),
        ("on_conflict", "block", "block"),
        ("on_conflict", "raise", "raise"),
        ("on_lost", "raise", "raise"),
        ("on_unavailable", "run", "run"),
        ("on_unavailable", "retry", "retry"),
        ("gap_ttl", timedelta(minutes=5), 300.0),
    ],
)
def test_a_good_value_is_taken(option: str, value: Any, taken: Any) -> None:
    assert getattr(declare(**{f"lock_{option}": value}), option) == taken


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("ttl", 0, "0.5"),
        ("ttl", 0.4, "0.5"),
        ("ttl", -1, "0.5"),
        ("ttl", "30", "seconds"),
        ("ttl", None, "seconds"),
        ("ttl", True, "seconds"),
        ("ttl", float("nan"), "seconds"),
        ("ttl", float("inf"), "seconds"),
        ("ttl", timedelta(milliseconds=1), "0.5"),
        ("ttl", 315_360_001, "at most ten years"),
        ("cooldown", 1e300, "at most ten years"),
        ("order_gap", timedelta(days=4000), "at most ten years"),
        ("dedup", 10**50, "at most ten years"),
        ("max_wait", -0.1, "from 0"),
        ("max_wait", False, "None"),
        ("max_wait", "10", "seconds"),
        ("limit", 0, "from 1"),
        ("limit", 1.0, "whole number"),
        ("limit", True, "whole number"),
        ("limit", None, "whole number"),
        ("owner", "workflow", "'root', 'task', or a callable"),
        ("owner", None, "'root'"),
        ("reentrant", "inlin", "'inline'"),
        ("reentrant", True, "'inline'"),
        ("on_conflict", "queue", "'wait', 'block', 'retry', 'drop', 'raise', or a callable"),
        ("on_conflict", None, "'retry'"),
        ("on_lost", "ignore", "'flag', 'raise'"),
        ("on_unavailable", "skip", "'raise', 'retry', 'run'"),
        ("hold", "chain", "'task'"),
        ("keep_on_retry", 1, "True or False"),
        ("max_parked", -1, "a whole number from 1"),
        ("key", True, "template"),
        ("key", 42, "template"),
        ("key", b"account", "template"),
        ("key", {"a:{x}"}, "template"),
        ("key", ["a:{x}", None], "template"),
    ],
)
def test_a_bad_value_is_refused_with_the_option_the_value_and_what_is_allowed(
    option: str, value: Any, says: str
) -> None:
    message = refusal(**{f"lock_{option}": value})

    assert f"lock_{option}={value!r}" in message
    assert says in message


def test_a_bad_app_wide_default_is_told_by_the_name_of_its_setting() -> None:
    message = refusal({"ttl": "soon"})

    assert "relock_ttl='soon'" in message
    assert "lock_ttl='soon'" not in message.replace("relock_ttl", "")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("lock_tll", "lock_ttl"),
        ("lock_keys", "lock_key"),
        ("lock_onconflict", "lock_on_conflict"),
        ("lock_on_duplicates", "lock_on_duplicate"),
        ("lock_maxwait", "lock_max_wait"),
        ("lock_timeout", "lock_ttl"),
        ("lock_expiry", "lock_ttl"),
        ("lock_blocking_timeout", "lock_max_wait"),
    ],
)
def test_an_unknown_option_is_refused_and_the_right_one_suggested(written: str, meant: str) -> None:
    message = refusal(**{written: 1})

    assert f"no option {written}. Did you mean {meant}?" in message


def test_an_unknown_option_like_no_other_is_refused_with_all_there_are() -> None:
    message = refusal(lock_zzz=1)

    assert all(f"lock_{name}" in message for name in OPTION_NAMES)


@pytest.mark.parametrize("value", [None, "until_start", "until_done", 2.5, timedelta(seconds=5)])
def test_duplicates_are_looked_for_for_as_long_as_asked(value: Any) -> None:
    found = declare(lock_dedup=value).dedup

    assert found == (5.0 if isinstance(value, timedelta) else value)


def test_a_misspelt_time_for_duplicates_is_refused_with_the_right_ones() -> None:
    assert "'until_done'" in refusal(lock_dedup="until_dnoe")


def test_duplicates_without_a_lock_name_are_refused_unless_the_app_asks_for_them() -> None:
    assert "lock_key=False" in refusal(lock_key=False, lock_dedup="until_done")
    options = LockOptions.collect({"lock_key": False}, {"dedup": "until_done"}, "app.charge")

    assert options.dedup == "until_done"


@pytest.mark.parametrize("policy", ["drop", "raise"])
def test_a_wait_for_a_lock_that_is_not_waited_for_is_refused(policy: str) -> None:
    written: dict[str, Any] = {"lock_on_conflict": policy, "lock_max_wait": 10}
    message = refusal(**written)

    assert "lock_max_wait=10" in message
    assert "'block'" in message
    # For its turn, or for Redis.
    for waits in ({"lock_order": "sent"}, {"lock_on_unavailable": "retry"}):
        assert declare(**written, **waits).max_wait == 10


@pytest.mark.parametrize("policy", ["block", "retry", "drop", "raise"])
def test_a_bound_of_what_is_parked_is_refused_where_nothing_is(policy: str) -> None:
    written: dict[str, Any] = {"lock_on_conflict": policy, "lock_max_parked": 5}
    message = refusal(**written)

    assert "lock_max_parked=5" in message
    assert repr(policy) in message
    assert declare(**written, lock_order="sent").max_parked == 5
    for parks in ("wait", lambda conflict: "wait"):
        assert declare(lock_on_conflict=parks, lock_max_parked=5).max_parked == 5


def test_a_function_is_refused_where_it_would_have_to_travel_in_messages() -> None:
    written = {"lock_on_conflict": lambda conflict: "wait", "lock_hold": "workflow"}
    assert "tells the next steps in their messages" in refusal(**written)


@pytest.mark.parametrize("max_wait", [None, 0])
def test_raising_at_once_may_be_written_down_as_no_wait(max_wait: float | None) -> None:
    assert declare(lock_on_conflict="raise", lock_max_wait=max_wait).max_wait == max_wait


@pytest.mark.parametrize(
    ("option", "needed"),
    [
        ({"lock_order_gap": 5.0}, {"lock_order": "sent"}),
        ({"lock_order_retry": "end"}, {"lock_order": "sent"}),
        ({"lock_debounce_max": 60}, {"lock_debounce": 5}),
        ({"lock_debounce_reduce": max}, {"lock_debounce": 5}),
        ({"lock_on_gap": "raise"}, {"lock_hold": "workflow"}),
    ],
)
def test_an_option_of_a_feature_is_refused_without_the_feature(option: Any, needed: Any) -> None:
    ((name, value),) = needed.items()
    assert f"is never used without {name}={value!r}" in refusal(**option)
    assert getattr(declare(**option, **needed), name.removeprefix("lock_")) == value


def test_an_app_wide_wait_does_not_forbid_a_task_to_raise_at_once() -> None:
    options = LockOptions.collect({"lock_on_conflict": "raise"}, {"max_wait": 10}, "app.charge")

    assert options.on_conflict == "raise"


@pytest.mark.parametrize(
    ("default", "own"),
    [
        ({"order": "sent"}, {"lock_key": False}),
        ({"order": "sent"}, {"lock_limit": 3}),
        ({"limit": 3}, {"lock_order": "sent"}),
        ({"limit": 3}, {"lock_mode": "shared"}),
        ({"limit": 3}, {"lock_mode": str}),
        ({"limit": {"account:{n}": 3}}, {"lock_key": "shop:{n}"}),
        ({"cooldown": 5}, {"lock_hold": "workflow"}),
        ({"on_conflict": str}, {"lock_hold": "workflow"}),
        ({"on_conflict": "drop"}, {"lock_max_wait": 5}),
        ({"debounce": 5}, {"lock_order": "sent"}),
    ],
)
def test_a_default_of_the_app_gives_way_to_what_a_task_says(
    default: dict[str, Any], own: dict[str, Any]
) -> None:
    options = LockOptions.collect(own, default, "app.charge")

    assert options == LockOptions.collect(own, {}, "app.charge")


@pytest.mark.parametrize(
    ("declared", "own"),
    [
        ({"lock_hold": "workflow"}, {"cooldown": 5.0}),
        ({"lock_order": "sent", "lock_order_retry": "end"}, {"keep_on_retry": True}),
    ],
)
def test_what_a_call_said_gives_way_to_what_its_task_says_when_it_comes(
    declared: dict[str, Any], own: dict[str, Any]
) -> None:
    options = declare(**declared)
    with pytest.raises(LockConfigError):
        options.of_call(own)

    assert options.of_call({**own, "ttl": 7}, is_sent=True) == options.of_call({"ttl": 7})


@pytest.mark.parametrize("policy", ["block", "retry", "drop", "raise"])
def test_what_a_call_said_may_be_of_no_use_when_it_comes(policy: str) -> None:
    options = declare(lock_on_conflict=policy)
    with pytest.raises(LockConfigError, match="is never used"):
        options.of_call({"max_parked": 5})

    came = options.of_call({"max_parked": 5, "max_wait": 60, "on_lost": "raise"}, is_sent=True)
    assert (came.on_conflict, came.on_lost) == (policy, "raise")


def test_what_a_call_said_is_refused_when_it_comes_if_it_cannot_be_used() -> None:
    for values in ({"key": "a"}, {"tll": 5}, {"ttl": "long"}):
        with pytest.raises(LockConfigError, match="a call of"):
            declare().of_call(values, is_sent=True)


def test_defaults_of_the_app_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(LockConfigError, match=r"the app's settings .*excludes lock_limit=3"):
        LockOptions.collect({"lock_key": "a"}, {"order": "sent", "limit": 3}, "app.charge")


def test_defaults_for_one_feature_are_kept_for_the_tasks_that_use_it() -> None:
    defaults = {"order_gap": 5.0, "debounce_max": 60.0, "on_gap": "raise"}

    assert LockOptions.collect({}, defaults, "app.charge").order is None
    assert LockOptions.collect({"lock_order": "sent"}, defaults, "app.charge").order_gap == 5.0


@pytest.mark.parametrize(("max_wait", "patience"), [(None, 60.0), (0, 0.0), (2.5, 2.5)])
def test_a_worker_slot_is_waited_in_for_a_minute_unless_said_otherwise(
    max_wait: float | None, patience: float
) -> None:
    assert declare(lock_max_wait=max_wait).patience == patience


def test_a_limit_is_the_same_for_every_call_unless_it_is_a_callable() -> None:
    assert declare(lock_limit=3).limit_for({"account": 1}) == 3


def test_a_limit_callable_gets_the_arguments_that_it_names() -> None:
    arguments = {"account": "gold", "amount": 10}
    limits = {"gold": 5}

    assert declare(lock_limit=lambda account: limits[account]).limit_for(arguments) == 5
    assert declare(lock_limit=lambda amount, factor=2: amount * factor).limit_for(arguments) == 20
    assert declare(lock_limit=lambda **every: len(every)).limit_for(arguments) == 2
    assert declare(lock_limit=lambda: 4).limit_for(arguments) == 4
    assert declare(lock_limit=partial(pow, 2, exp=3)).limit_for({}) == 8


@pytest.mark.parametrize(
    "limit", [lambda account: 0, lambda: "2", lambda: True, lambda nobody: 1, lambda: 1 / 0]
)
def test_a_limit_callable_that_gives_no_number_is_told_with_the_task(limit: Any) -> None:
    with pytest.raises(LockConfigError, match=r"app\.charge.*lock_limit"):
        declare(lock_limit=limit).limit_for({"account": 1})


def test_options_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        declare().ttl = 5.0  # type: ignore[misc]


def test_a_type_checker_knows_the_words_of_each_option() -> None:
    hints = get_type_hints(LockedTask)

    def words(hint: Any) -> set[str]:
        return {hint} if isinstance(hint, str) else set().union(*map(words, get_args(hint)))

    for option in fields(LockOptions)[:-1]:
        hint = hints[f"lock_{option.name}"]
        if hint is not Any:
            assert words(hint) == {*re.findall(r"'(\w+)'", option.metadata["allowed"])}, option.name
