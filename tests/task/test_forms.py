"""Whatever form a task has, its body runs under its lock, and nothing else about it changes."""

from __future__ import annotations

import celery
import pytest

from celery_relock import Lock
from tests.support import wait_for

FORMS = [
    "plain",
    "bound",
    "own_call_with_super",
    "own_call_without_super",
    "own_call_in_a_mixin",
    "annotated",
    "class_based",
    "inherited",
    "Unnamed",
    "shared",
    "untyped",
    "key_from_a_callable",
    "key_from_a_method",
]


@pytest.fixture(scope="module")
def forms(module_worker):
    return module_worker("tests.task.apps.forms", concurrency=2)


@pytest.fixture
def is_free(forms):
    conf = forms.module.app.conf

    def check(account):
        lock = Lock(conf.relock_url, f"account:{account}", namespace=conf.relock_namespace)
        return not lock.locked()

    return check


def _task(forms, name):
    return forms.module.app.tasks[f"tests.task.apps.forms.{name}"]


@pytest.mark.parametrize("name", FORMS)
def test_the_body_runs_under_the_lock_in_a_worker(forms, account, is_free, name):
    seen = _task(forms, name).delay(account).get(timeout=20)
    assert seen["name"] == f"account:{account}"
    assert seen["holds"] == 1
    assert seen["fence"] > 0
    assert seen.get("own", 0) == 0, "the class's own __call__ lies around the lock"
    assert is_free(account)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("how", ["directly", "by apply"])
def test_the_body_runs_under_the_lock_without_a_worker(forms, account, is_free, name, how):
    task = _task(forms, name)
    seen = task(account) if how == "directly" else task.apply((account,)).get()
    assert (seen["name"], seen["holds"]) == (f"account:{account}", 1)
    assert seen.get("own", 0) == 0
    assert is_free(account)


def test_a_class_without_a_name_is_retried_and_its_subclass_has_a_lock_of_its_own(forms, account):
    module = forms.module
    assert module.unnamed.delay(account, fails=True).get(timeout=20)["name"] == f"account:{account}"
    name = module.unnamed_too.delay(account).get(timeout=20)
    assert name.startswith("tests.task.apps.forms.UnnamedToo:")


def test_the_body_of_a_base_class_runs_under_the_lock_of_what_it_is_called_with(
    forms, account, is_free
):
    other = f"{account}-other"
    names = [f"account:{account}", f"account:{other}"]
    assert forms.module.for_another.delay(account, other).get(timeout=20) == [names, names[0]]
    assert is_free(other)


def test_the_body_of_a_base_class_with_other_parameters_runs_under_the_lock_of_the_caller(
    forms, account
):
    assert forms.module.for_all.delay(account=account).get(timeout=20)["holds"] == 1


@pytest.mark.skipif(celery.VERSION < (5, 7), reason="Celery does not dump models before 5.7")
def test_a_pydantic_task_has_one_name_as_model_and_as_dict(forms, account):
    module = forms.module
    model = module.Transfer(account=account)
    for result in [
        module.with_a_model.delay(model).get(timeout=20),
        module.with_a_model.delay({"account": account}).get(timeout=20),
        module.with_a_model(model),
        module.with_a_model.apply((model,)).get(),
    ]:
        assert (result["name"], result["holds"]) == (f"account:{account}", 1)


@pytest.mark.parametrize("fail", [False, True])
def test_hooks_run_as_ever_and_find_the_lock_free(forms, account, fail):
    result = forms.module.hooked.delay(account, fail)
    result.get(timeout=20, propagate=False)
    found = forms.journal.wait_for(
        lambda events: [e for e in events if e.data.get("account") == account][3:]
    )
    told = [e for e in found if e.data.get("account") == account]
    after = "on_failure" if fail else "on_success"
    assert [e.name for e in told] == ["before_start", "body", after, "after_return"]
    assert [e["holds"] for e in told] == [0, 1, 0, 0]
    assert [e["mine"] for e in told] == [False, True, False, False]


def test_the_lock_is_free_during_the_backoff_of_an_autoretry(forms, account, is_free):
    result = forms.module.autoretried.delay(account)
    forms.journal.wait_for(lambda events: any(e.data.get("account") == account for e in events))
    # The backoff is three seconds, so another task has time to come and go.
    between = forms.module.plain.delay(account).get(timeout=20)
    assert result.get(timeout=20) == 1
    attempts = forms.journal.events("attempt", account=account)
    assert [e["retries"] for e in attempts] == [0, 1]
    assert attempts[0]["fence"] < between["fence"] < attempts[1]["fence"]


def test_a_conflict_is_retried_where_the_task_says_autoretry_for_it(forms, account):
    forms.module.held_until.delay(account)
    forms.journal.wait_for(lambda events: any(e.data.get("account") == account for e in events))
    result = forms.module.autoretried_after_a_conflict.delay(account)
    wait_for(lambda: result.state == "RETRY", what="the conflict is retried")
    forms.journal.add(f"free {account}")
    assert result.get(timeout=20) >= 1


def test_the_request_of_the_body_is_the_one_that_celery_made(forms, account):
    # Celery swaps Task.__call__ in its workers so that a class with a __call__ of its own does not
    # run its body under a copy of the request, where children and marks would be lost.
    result = forms.module.with_children.delay(account)
    assert result.get(timeout=20) == [True, 1]
    assert len(result.children) == 1


def test_a_call_that_does_not_fit_fails(forms):
    result = forms.module.untyped.delay("too", "many", "arguments")
    with pytest.raises(TypeError, match="positional argument"):
        result.get(timeout=20)
