"""The option lock_key: each form that it has, and each mistake that is told at declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, Retry

from celery_relock.errors import LockConfigError, LockLost
from celery_relock.naming.names import NameRule
from celery_relock.naming.template import MAX_NAME_BYTES, check_name


def sync(account_id: int, kind: str = "full") -> None:
    """A task body."""


def spread(first: int, *rest: int, **more: Any) -> None:
    """A task body that takes more."""


def compiled(key: Any, body: Callable[..., Any] = sync) -> NameRule:
    return NameRule.compile(key, "proj.sync", inspect.signature(body))


def names(key: Any, *args: Any, body: Callable[..., Any] = sync, **kwargs: Any) -> tuple[str, ...]:
    bound = inspect.signature(body).bind(*args, **kwargs)
    bound.apply_defaults()
    return compiled(key, body).names(bound.arguments)


class Keys:
    def method(self, account_id: int) -> str:
        return f"m:{account_id}"

    def misspelt(self, acount_id: int) -> str:
        return f"m:{acount_id}"

    @classmethod
    def by_class(cls, account_id: int) -> str:
        return f"c:{account_id}"

    @staticmethod
    def static(account_id: int) -> str:
        return f"s:{account_id}"

    def __call__(self, account_id: int) -> str:
        return f"i:{account_id}"


def positional(account_id: int, kind: str = "?", /) -> str:
    return f"p:{account_id}:{kind}"


def prefixed(prefix: str, account_id: int, kind: str = "?") -> str:
    return f"{prefix}:{account_id}:{kind}"


def test_without_a_key_the_name_is_the_task_and_a_digest_of_its_arguments() -> None:
    (name,) = names(None, 1)

    assert name.startswith("proj.sync:")
    assert len(name) == len("proj.sync:") + 22
    assert names(None, 1) == names(None, 1, "full") == names(None, kind="full", account_id=1)
    assert names(None, 1) != names(None, "1")
    assert names(None, 1) != names(None, 1, "part")


def test_the_default_names_of_two_tasks_differ() -> None:
    other = NameRule.compile(None, "proj.other", inspect.signature(sync))

    assert other.names({"account_id": 1, "kind": "full"}) != names(None, 1)


def test_a_false_key_acquires_no_lock() -> None:
    assert names(False, 1) == ()


def test_a_template_and_a_list_give_sorted_names_each_once() -> None:
    assert names("account:{account_id}", 7) == ("account:7",)
    assert names(["z:{kind}", "a:{account_id}", "a:7"], 7) == ("a:7", "z:full")
    assert names(("b", lambda account_id: [f"a:{account_id}", "b"]), 7) == ("a:7", "b")


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (lambda account_id: f"l:{account_id}", "l:7"),
        (lambda kind, account_id: f"{kind}:{account_id}", "full:7"),
        (lambda: "constant", "constant"),
        (lambda account_id, other="d": f"{account_id}:{other}", "7:d"),
        (lambda account_id, *args: f"{account_id}:{args}", "7:()"),
        (
            lambda **arguments: f"{sorted(arguments.items())}",
            "[('account_id', 7), ('kind', 'full')]",
        ),
        (lambda account_id, **others: f"{account_id}:{others}", "7:{'kind': 'full'}"),
        (positional, "p:7:full"),
        (partial(prefixed, "x"), "x:7:full"),
        (partial(prefixed, prefix="x"), "x:7:full"),
        (partial(prefixed, "x", kind="mine"), "x:7:mine"),
        (Keys().method, "m:7"),
        (Keys.by_class, "c:7"),
        (Keys.static, "s:7"),
        (vars(Keys)["static"], "s:7"),
        (Keys(), "i:7"),
    ],
)
def test_a_callable_gets_the_arguments_that_it_names(key: Any, name: str) -> None:
    assert names(key, 7) == (name,)


def test_an_unused_default_of_the_callable_gives_way_to_the_argument() -> None:
    assert names(lambda account_id, kind="mine": f"{account_id}:{kind}", 7) == ("7:full",)


def test_what_the_task_takes_as_extra_arguments_can_be_named() -> None:
    def key(first: int, rest: tuple[int, ...], more: dict[str, Any], region: str) -> str:
        return f"{first}:{rest}:{more}:{region}"

    def everything(**arguments: Any) -> str:
        return ",".join(sorted(arguments))

    call = {"body": spread, "region": "eu"}

    assert names("{first}:{rest[0]}:{more[region]}:{region}", 1, 2, **call) == ("1:2:eu:eu",)
    assert names(key, 1, 2, **call) == ("1:(2,):{'region': 'eu'}:eu",)
    assert names(everything, 1, 2, **call) == ("first,more,region,rest",)


def test_a_missing_extra_argument_is_told_when_the_task_is_called() -> None:
    with pytest.raises(LockConfigError, match=r"\{region\} is missing: this call has no argument"):
        names("{region}", 1, body=spread)
    with pytest.raises(LockConfigError, match=r"missing 1 required.*'region'"):
        names(lambda region: region, 1, body=spread)


async def coroutine(account_id: int) -> str:
    return "x"


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("account:{acount_id}", "'acount_id'.*Did you mean 'account_id'"),
        ("account:{}", "must name an argument"),
        (["ok", "account:{nope}"], "'nope'"),
        ("", "empty"),
        ("   ", "empty"),
        ("a\tb:{account_id}", "control character"),
        ("line\n", "control character"),
        ([], "empty.*False"),
        ((), "empty.*False"),
        (True, "of type bool"),
        (5, "of type int"),
        (b"x", "of type bytes"),
        ({"a"}, "of type set"),
        ({}, "of type dict"),
        (["a", None], "of type NoneType"),
        (["a", ["b"]], "of type list"),
        (lambda acount_id: "x", "wants 'acount_id'.*Did you mean 'account_id'"),
        (lambda nope, /: "x", "wants 'nope'"),
        (Keys.method, "wants 'self'.*take 'self' away"),
        (partial(Keys.misspelt, Keys()), r"lock_key Keys\.misspelt wants 'acount_id'"),
        (vars(Keys)["by_class"], "of type classmethod"),
        (coroutine, "coroutine function"),
        (max, "does not tell which arguments"),
    ],
)
def test_a_key_that_can_never_work_is_refused_at_declaration(key: Any, says: str) -> None:
    with pytest.raises(LockConfigError, match=rf"(?s)task proj\.sync: .*{says}") as caught:
        compiled(key)
    assert str(caught.value).count(caught.value.page) == 1


@pytest.mark.parametrize(
    "made", [None, 5, b"x", [], (), ["a", None], {"a"}, {"a": 1}, [["a"]], True]
)
def test_a_callable_that_returns_no_name_is_refused(made: Any) -> None:
    with pytest.raises(LockConfigError, match=r"proj\.sync: lock_key .*lambda.* returned"):
        names(lambda: made, 1)


@pytest.mark.parametrize(
    "made", ["", "  ", "\u2003", ["a", ""], "a\x00b", "a\x7f", "\ud800", "a\u2028b"]
)
def test_a_name_that_no_lock_can_have_is_refused(made: Any) -> None:
    with pytest.raises(LockConfigError, match=r"task proj\.sync: the lock name"):
        names(lambda: made, 1)


def test_a_value_with_a_control_character_is_refused() -> None:
    with pytest.raises(LockConfigError, match="control character") as caught:
        names("kind:{kind}", 1, "a\nb")

    assert caught.value.name == "kind:a\nb"


def test_a_callable_that_raises_is_our_error_with_its_cause() -> None:
    def key(account_id: int) -> str:
        raise KeyError(account_id)

    with pytest.raises(LockConfigError, match=r"proj\.sync: .*key raised KeyError\(7\)") as caught:
        names(key, 7)

    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    "raised", [Ignore(), Reject(), Retry(), LockLost("gone")], ids=lambda each: type(each).__name__
)
def test_what_ends_the_task_is_no_error_of_its_callable(raised: Exception) -> None:
    def key(account_id: int) -> str:
        raise raised

    with pytest.raises(type(raised)):
        names(key, 1)


@pytest.mark.parametrize("key", ["{account_id}", "{account_id.id}", None])
def test_a_signal_that_strikes_while_a_value_is_read_is_no_fault_of_the_value(key: Any) -> None:
    class Struck:
        id = property(lambda self: self.__json__())

        def __json__(self) -> None:
            raise LockLost("gone")

    class StruckLater(Struck):
        __json__ = None  # type: ignore[assignment]

        def __str__(self) -> str:
            raise LockLost("gone")

        __repr__ = __str__
        id = property(__str__)

    for struck in (Struck(), StruckLater()):
        with pytest.raises(LockLost):
            names(key, struck)


def test_reading_an_attribute_of_a_model_that_came_as_a_mapping_is_explained() -> None:
    with pytest.raises(LockConfigError, match="read its items"):
        names(lambda account_id: account_id.id, {"id": 1})


@pytest.mark.parametrize(
    "name", ["a", " padded ", "zoë:{}:é", "a\u00a0b", "\U0001f512", "x" * 4096]
)
def test_any_visible_text_is_a_name(name: str) -> None:
    assert check_name(name, "here") == name


def test_a_long_name_stays_whole_and_a_huge_one_is_refused() -> None:
    assert names("x:{kind}", 1, "y" * 500) == ("x:" + "y" * 500,)

    with pytest.raises(LockConfigError, match="4098 bytes, the most is 4096"):
        names("x:{kind}", 1, "ä" * (MAX_NAME_BYTES // 2))


def test_a_name_that_reads_an_argument_whose_default_is_none_is_refused_where_it_is_declared() -> (
    None
):
    def task(a: object = None) -> None: ...

    with pytest.raises(LockConfigError, match="reads 'a', whose default is None"):
        NameRule.compile("r:{a}", "app.task", inspect.signature(task))
