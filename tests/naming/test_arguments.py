"""Arguments and lock names of real Celery tasks, for every way to declare and to call one.

No postponed annotations here: Celery before 5.7 does not look behind them for pydantic models.
"""

import enum
import functools
import inspect
import uuid
from collections.abc import Iterator
from typing import Any

import pydantic
import pytest
from celery import VERSION, Celery, Task, _state, shared_task
from kombu.utils import json

from celery_relock.errors import LockConfigError
from celery_relock.naming.names import Misfit, NameRule, bind, signature_of


class Order(pydantic.BaseModel):
    id: int
    ref: uuid.UUID = uuid.UUID(int=7)
    region: str | None = pydantic.Field(default=None, alias="area")


class Recording(Task):  # type: ignore[misc]
    """Binds and names its arguments where the lock is taken: around the body."""

    lock_key: Any = None
    seen: list[tuple[dict[str, Any], tuple[str, ...]]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = bind(self, args, kwargs)
        self.seen.append((arguments, named(self, arguments)))
        return super().__call__(*args, **kwargs)


def named(task: Any, arguments: dict[str, Any]) -> tuple[str, ...]:
    declared = inspect.getattr_static(type(task.app.tasks[task.name]), "lock_key", None)
    rule = NameRule.compile(declared, task.name, signature_of(task))
    return rule.names(arguments)


class Private(Celery):  # type: ignore[misc]
    """An app whose tasks do not turn up in the apps of other tests."""

    def task(self, *args: Any, **options: Any) -> Any:
        return super().task(*args, **{"shared": False, **options})


@pytest.fixture
def app() -> Iterator[Celery]:
    made = Private("binding", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.task_store_eager_result = False
    Recording.seen = []
    yield made
    made.close()


def through_worker(task: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a task as a worker does: with the arguments that its message carries."""
    sent = json.loads(json.dumps([args, kwargs]))
    return task.apply(sent[0], sent[1]).get()


def all_ways(task: Any) -> list[dict[str, Any]]:
    return [
        bind(task, (1,), {}),
        bind(task, [1, "full"], {}),
        bind(task, (1,), {"kind": "full"}),
        bind(task, (), {"kind": "full", "account_id": 1}),
    ]


ONE_CALL = {"account_id": 1, "kind": "full"}


def test_a_plain_task_binds_every_way_to_call_it_alike(app: Celery) -> None:
    @app.task
    def sync(account_id, kind="full"):
        pass

    assert all_ways(sync) == [ONE_CALL] * 4


def test_a_bound_task_leaves_out_self(app: Celery) -> None:
    @app.task(bind=True)
    def sync(self, account_id, kind="full"):
        pass

    assert all_ways(sync) == [ONE_CALL] * 4
    assert list(signature_of(sync).parameters) == ["account_id", "kind"]


def test_a_class_based_task_leaves_out_self(app: Celery) -> None:
    class Sync(Task):  # type: ignore[misc]
        name = "sync"

        def run(self, account_id, kind="full"):
            pass

    assert all_ways(app.register_task(Sync())) == [ONE_CALL] * 4


def test_a_shared_task_binds(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its proxy asks the current app, which is that of whichever test ran before.
    monkeypatch.setattr(_state._tls, "current_app", app)

    @shared_task(name="binding.shared")
    def sync(account_id, kind="full"):
        pass

    app.finalize()

    assert all_ways(app.tasks["binding.shared"]) == [ONE_CALL] * 4
    assert all_ways(sync) == [ONE_CALL] * 4


@pytest.mark.parametrize("bound", [True, False])
def test_autoretry_does_not_hide_the_signature(app: Celery, bound: bool) -> None:
    def plain(account_id, kind="full"):
        pass

    def with_self(self, account_id, kind="full"):
        pass

    sync = app.task(bind=bound, autoretry_for=(ValueError,))(with_self if bound else plain)

    assert all_ways(sync) == [ONE_CALL] * 4


def test_autoretry_of_a_class_based_task_does_not_hide_the_signature(app: Celery) -> None:
    class Sync(Task):  # type: ignore[misc]
        name = "sync"
        autoretry_for = (ValueError,)

        def run(self, account_id, kind="full"):
            pass

    assert all_ways(app.register_task(Sync())) == [ONE_CALL] * 4


def test_a_decorator_that_wraps_does_not_hide_the_signature(app: Celery) -> None:
    def decorated(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @app.task
    @decorated
    def sync(account_id, kind="full"):
        pass

    assert all_ways(sync) == [ONE_CALL] * 4


def test_extra_arguments_come_under_their_parameter(app: Celery) -> None:
    @app.task
    def sync(account_id, *rest, **more):
        pass

    assert bind(sync, (1, 2, 3), {"region": "eu"}) == {
        "account_id": 1,
        "rest": (2, 3),
        "more": {"region": "eu"},
    }


def test_parameters_named_like_our_own_are_bound(app: Celery) -> None:
    @app.task(typing=False)
    def sync(task, args, kwargs, signature=1):
        pass

    given = {"task": 1, "args": 2, "kwargs": 3}

    assert bind(sync, (), given) == {**given, "signature": 1}


MISFITS = [
    ((), {}, "missing a required argument: 'account_id'"),
    ((1, 2, 3), {}, "too many positional arguments"),
    ((1,), {"nope": 1}, "unexpected keyword argument 'nope'"),
    ((1,), {"account_id": 1}, "multiple values for argument 'account_id'"),
]


def lenient(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(1)

    return wrapper


@pytest.mark.parametrize(("args", "kwargs", "says"), MISFITS)
@pytest.mark.parametrize("decorator", [lambda function: function, lenient])
@pytest.mark.parametrize(
    "options", [{}, {"typing": False}, {"autoretry_for": (ValueError,)}, {"pydantic": True}]
)
def test_a_call_that_does_not_fit_never_runs_though_a_decorator_may_accept_it(
    app: Celery, options: dict[str, Any], decorator: Any, args: Any, kwargs: Any, says: str
) -> None:
    ran = []

    @app.task(base=Recording, name="sync", **options)
    @decorator
    def sync(account_id, kind="full"):
        ran.append(account_id)

    with pytest.raises(Misfit, match=rf"sync\(account_id, kind='full'\) .*{says}.*__signature__"):
        sync(*args, **kwargs)

    assert not ran


def test_a_decorator_can_tell_which_arguments_it_takes(app: Celery) -> None:
    def with_session(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function("session", *args, **kwargs)

        told = inspect.signature(function)
        wrapper.__signature__ = told.replace(parameters=list(told.parameters.values())[1:])
        return wrapper

    @app.task(typing=False)
    @with_session
    def sync(session, account_id, kind="full"):
        pass

    assert all_ways(sync) == [ONE_CALL] * 4


def test_a_body_that_does_not_tell_its_signature_takes_anything(app: Celery) -> None:
    class Largest(Task):  # type: ignore[misc]
        name = "largest"
        run = staticmethod(max)

    task = app.register_task(Largest())

    assert bind(task, (1, 2), {"default": 3}) == {"args": (1, 2), "kwargs": {"default": 3}}


def test_the_signature_is_read_once_per_task(app: Celery) -> None:
    @app.task
    def one(a):
        pass

    @app.task
    def other(b):
        pass

    assert signature_of(one) is signature_of(one)
    assert list(signature_of(other).parameters) == ["b"]


@pytest.mark.parametrize(
    "key", [None, "order:{order.id}", "order:{order[id]}", lambda order: f"order:{order['id']}"]
)
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.skipif(VERSION < (5, 5), reason="Celery 5.4 makes no models of arguments")
def test_a_model_has_one_name_inline_and_in_the_worker(app: Celery, key: Any, bound: bool) -> None:
    got = []

    def plain(order: Order, note: str = "") -> None:
        got.append(order)

    def with_self(self, order: Order, note: str = "") -> None:
        got.append(order)

    body = with_self if bound else plain
    ship = app.task(base=Recording, name="ship", pydantic=True, bind=bound, lock_key=key)(body)
    order = Order(id=5, area="eu")
    ship(order)
    ship(order=order, note="")
    through_worker(ship, order.model_dump(mode="json", by_alias=True))

    (first, name), *others = ship.seen
    assert got == [order] * 3, "the body gets models, whatever the name was made of"
    assert [arguments["order"]["id"] for arguments, _ in ship.seen] == [5, 5, 5]
    if key is not None:
        assert {name} == {made for _, made in others} == {("order:5",)}
    assert first == others[0][0]


def test_a_model_and_the_mapping_that_it_is_sent_as_have_one_default_name(app: Celery) -> None:
    class Plain(pydantic.BaseModel):
        id: int
        ref: uuid.UUID = uuid.UUID(int=7)

    @app.task(base=Recording, pydantic=True)
    def ship(order: Plain):
        pass

    ship(Plain(id=5))
    through_worker(ship, Plain(id=5).model_dump(mode="json"))

    assert ship.seen[0] == ship.seen[1]


def test_celery_dump_options_apply_to_an_inline_call_too(app: Celery) -> None:
    @app.task(base=Recording, pydantic=True, pydantic_dump_kwargs={"by_alias": True})
    def ship(order: Order):
        pass

    if getattr(ship, "_dump_pydantic_arguments", None) is None:
        pytest.skip("this Celery does not dump models by itself")
    ship(Order(id=5, area="eu"))
    through_worker(ship, Order(id=5, area="eu").model_dump(mode="json", by_alias=True))

    assert ship.seen[0] == ship.seen[1]
    assert ship.seen[0][0]["order"]["area"] == "eu"


def test_pickle_keeps_models(app: Celery) -> None:
    @app.task(serializer="pickle", lock_key=lambda order: f"order:{order.id}")
    def ship(order):
        pass

    arguments = bind(ship, (Order(id=5),), {})

    assert arguments == {"order": Order(id=5)}
    assert named(ship, arguments) == ("order:5",)


def test_a_default_that_is_a_model_is_named_like_a_given_one(app: Celery) -> None:
    @app.task(pydantic=True)
    def ship(order: Order = Order(id=5)):  # noqa: B008
        pass

    assert bind(ship, (), {}) == bind(ship, (Order(id=5),), {})


@pytest.mark.parametrize("default", [[], {}, set(), bytearray()])
def test_a_default_that_a_body_fills_gives_the_name_that_it_had_before(
    app: Celery, default: Any
) -> None:
    @app.task
    def collects(account, seen=default):
        pass

    before = named(collects, bind(collects, (1,), {}))
    default.extend(b"x") if hasattr(default, "extend") else default.update({"x": 1})
    assert named(collects, bind(collects, (1,), {})) == before


def test_the_result_of_the_step_before_is_the_first_argument(app: Celery) -> None:
    @app.task(base=Recording, lock_key="{previous}:{account_id}")
    def second(previous, account_id):
        return previous

    @app.task
    def first():
        return "made"

    app.conf.task_always_eager = True
    (first.s() | second.s(account_id=3)).apply_async().get()

    assert [name for _, name in second.seen] == [("made:3",)]


def test_inline_apply_and_message_give_one_default_name(app: Celery) -> None:
    class Text(str, enum.Enum):
        A = "a"

    @app.task(base=Recording)
    def sync(rows, ref=None, *, limits=None):
        pass

    rows, ref, limits = ((1, 2), b"\xff", {"a": Text.A}), uuid.UUID(int=3), {1: None}
    sync(rows, ref, limits=limits)
    sync.apply((rows,), {"ref": ref, "limits": limits})
    through_worker(sync, rows, limits=limits, ref=ref)

    assert len({name for _, name in sync.seen}) == 1
    assert len(sync.seen) == 3


def test_types_that_the_application_registered_are_named_as_they_are_sent(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Money:
        def __init__(self, cents: int) -> None:
            self.cents = cents

    class Amount:
        def __init__(self, cents: int) -> None:
            self.cents = cents

    monkeypatch.setattr(json, "_encoders", dict(json._encoders))
    monkeypatch.setattr(json, "_decoders", dict(json._decoders))
    json.register_type(Money, "money", lambda money: money.cents, Money)
    kinds = [Money]
    if inspect.signature(json.register_type).parameters["decoder"].default is None:
        json.register_type(Amount, None, lambda amount: {"cents": amount.cents})
        kinds.append(Amount)  # without a marker: that of kombu 5.3 needs one

    @app.task(base=Recording)
    def pay(money):
        pass

    for given in ([kind(5)] for kind in kinds):
        pay.seen.clear()
        pay(given)
        through_worker(pay, given)
        assert pay.seen[0][1] == pay.seen[1][1]


def test_an_argument_without_stable_form_names_the_task_and_the_argument(app: Celery) -> None:
    @app.task(name="proj.sync")
    def sync(account_id, session):
        pass

    with pytest.raises(LockConfigError, match=r"proj\.sync.*session \(object\).*lock_key"):
        named(sync, bind(sync, (1, object()), {}))


def free_function(account_id: int) -> str:
    return f"account:{account_id}"


@pytest.mark.parametrize(
    "key",
    [
        free_function,
        lambda account_id: f"account:{account_id}",
        staticmethod(free_function),
        functools.partial(free_function),
        "account:{account_id}",
        [free_function, "account:{account_id}"],
    ],
)
@pytest.mark.parametrize("bound", [True, False])
def test_a_key_given_to_the_decorator_is_not_bound_to_the_task(
    app: Celery, key: Any, bound: bool
) -> None:
    def plain(account_id):
        pass

    def with_self(self, account_id):
        pass

    sync = app.task(lock_key=key, bind=bound)(with_self if bound else plain)
    task = app.tasks[sync.name]

    assert named(task, bind(task, (7,), {})) == ("account:7",)
