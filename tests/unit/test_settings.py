"""Where an app's locks live and what its options default to, however the app is configured."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery

from celery_relock.errors import LockConfigError
from celery_relock.options import OPTION_NAMES
from celery_relock.settings import backend_settings, read_by_tasks


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BROKER_URL", "BROKER_READ_URL", "BROKER_WRITE_URL", "RESULT_BACKEND"):
        monkeypatch.delenv(f"CELERY_{name}", raising=False)


def make(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return app


def found(app: Celery) -> tuple[str, str]:
    settings = backend_settings(app)
    return settings.url, settings.source


def test_relock_url_goes_before_everything_else() -> None:
    app = make(
        relock_url="redis://locks/1", result_backend="redis://results", broker_url="redis://broker"
    )

    assert found(app) == ("redis://locks/1", "relock_url")


def test_a_redis_result_backend_goes_before_a_redis_broker() -> None:
    app = make(result_backend="redis://results/2", broker_url="redis://broker")

    assert found(app) == ("redis://results/2", "result_backend")


@pytest.mark.parametrize(
    "backend", [None, "rpc://", "disabled://", "db+sqlite:///x", "cache+memory://", "django-db"]
)
def test_a_redis_broker_serves_when_the_result_backend_is_none(backend: str | None) -> None:
    app = make(result_backend=backend, broker_url="redis://broker/3")

    assert found(app) == ("redis://broker/3", "broker_read_url")


def test_a_broker_and_a_backend_given_to_the_app_are_seen() -> None:
    assert found(Celery("shop", broker="redis://b", set_as_current=False))[0] == "redis://b"
    both = Celery("shop", broker="amqp://", backend="redis://r", set_as_current=False)
    assert found(both)[0] == "redis://r"


def test_the_read_broker_goes_before_the_write_broker() -> None:
    app = make(broker_read_url="redis://read", broker_write_url="redis://write")
    assert found(app) == ("redis://read", "broker_read_url")

    app = make(broker_read_url="amqp://read", broker_write_url="redis://write")
    assert found(app) == ("redis://write", "broker_write_url")


@pytest.mark.parametrize(
    "broker",
    ["amqp://a;redis://:p;w@b/1;redis://c", ["amqp://a", "redis://:p;w@b/1", "redis://c"]],
)
def test_of_a_list_for_failover_the_first_redis_serves(broker: Any) -> None:
    assert found(make(broker_url=broker))[0] == "redis://:p;w@b/1"


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://h",
        "REDIS://h",
        "redis+socket:///run/redis.sock?virtual_host=2",
        "socket:///run/redis.sock",
        "unix:///run/redis.sock",
        "sentinel://a:26379;sentinel://b:26379",
    ],
)
def test_every_spelling_of_a_redis_is_known(url: str) -> None:
    assert found(make(result_backend=url))[0] == url


def test_a_password_arrives_as_it_was_escaped_and_is_not_shown() -> None:
    settings = backend_settings(make(broker_url="redis://us%40r:p%40ss%2Fw%25rd@h/0"))

    assert settings.url == "redis://us%40r:p%40ss%2Fw%25rd@h/0"
    assert "rd" not in repr(settings)


def test_the_old_redis_settings_of_celery_are_read() -> None:
    app = make(result_backend="redis", redis_host="h", redis_password="p@ss/", redis_db=4)

    assert found(app)[0] == "redis://h:6379/4"
    assert backend_settings(app).transport == {"login": {"password": "p@ss/"}}


def test_celerys_login_of_the_result_backend_is_read_and_the_brokers_is_another() -> None:
    login = {"redis_username": "u", "redis_password": "secret"}
    app = make(result_backend="redis://h/1", broker_url="redis://b", **login)
    assert backend_settings(app).transport == {"login": {"username": "u", "password": "secret"}}
    assert "secret" not in repr(backend_settings(app))

    assert backend_settings(make(broker_url="redis://b", **login)).transport is None
    assert backend_settings(make(relock_url="redis://l", **login)).transport is None


@pytest.mark.parametrize(
    "broker", [None, "amqp://guest@h//", "memory://", "sqs://", "filesystem://"]
)
def test_without_any_redis_the_error_says_which_setting_to_set(broker: str | None) -> None:
    app = make(broker_url=broker, result_backend="cache+memory://")

    with pytest.raises(LockConfigError, match=r'relock_url = "redis://localhost:6379/0"'):
        backend_settings(app)


def test_settings_are_read_when_they_are_asked_for() -> None:
    app = make(relock_url="redis://first")
    assert found(app)[0] == "redis://first"

    app.conf.relock_url = "redis://second"
    app.conf.relock_ttl = 5

    assert found(app)[0] == "redis://second"
    assert read_by_tasks(app) == {"ttl": 5}


CONFIGURED = {
    "lower case": ({"relock_url": "redis://h/1", "relock_ttl": 5}, None),
    "namespace": ({"CELERY_RELOCK_URL": "redis://h/1", "CELERY_RELOCK_TTL": 5}, "CELERY"),
    "lower-case namespace": ({"shop_relock_url": "redis://h/1", "shop_relock_ttl": 5}, "shop"),
    "lower case, namespace not used": ({"relock_url": "redis://h/1", "relock_ttl": 5}, "CELERY"),
    "upper case": ({"RELOCK_URL": "redis://h/1", "RELOCK_TTL": 5}, None),
    "old upper case": (
        {"BROKER_URL": "amqp://", "CELERY_RELOCK_URL": "redis://h/1", "CELERY_RELOCK_TTL": 5},
        None,
    ),
}


@pytest.mark.parametrize("how", CONFIGURED)
@pytest.mark.parametrize("as_object", [False, True])
def test_every_way_to_write_a_celery_setting_works(how: str, as_object: bool) -> None:
    settings, namespace = CONFIGURED[how]
    app = Celery("shop", set_as_current=False)
    source = SimpleNamespace(**settings) if as_object else settings
    app.config_from_object(source, namespace=namespace)

    assert found(app) == ("redis://h/1", "relock_url")
    assert read_by_tasks(app) == {"ttl": 5}


@pytest.mark.parametrize(("namespace", "before"), [(None, "RELOCK"), ("CELERY", "CELERY_RELOCK")])
def test_a_configuration_object_that_computes_its_settings_is_asked_for_them(
    namespace: str | None, before: str
) -> None:
    class Environment:
        def __getattr__(self, name: str) -> str:
            try:
                return {f"{before}_URL": "redis://h/1", f"{before}_NAMESPACE": "shop"}[name.upper()]
            except KeyError:
                raise AttributeError(name) from None

    app = Celery("shop", broker="redis://broker", set_as_current=False)
    app.config_from_object(Environment(), namespace=namespace)

    assert found(app) == ("redis://h/1", "relock_url")
    assert backend_settings(app).namespace == "shop"


@pytest.mark.parametrize("name", ["Relock_Url", "relock_URL", "CELERY_Relock_Url"])
def test_a_setting_in_mixed_case_which_nobody_would_read_is_refused(name: str) -> None:
    app = Celery("shop", broker="redis://broker", set_as_current=False)
    app.config_from_object({name: "redis://h/1"})

    with pytest.raises(LockConfigError, match=f"{name} is not read.*Write relock_url"):
        backend_settings(app)


def test_what_is_set_on_the_app_goes_before_its_configuration_object() -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({"CELERY_RELOCK_URL": "redis://object"}, namespace="CELERY")
    app.conf.relock_url = "redis://app"

    assert found(app)[0] == "redis://app"


@pytest.mark.parametrize("before", ["", "CELERY_"])
def test_capitals_without_the_namespace_are_not_read_in_the_configuration_object(
    before: str,
) -> None:
    app = Celery("shop", broker="redis://broker", set_as_current=False)
    settings = {f"{before}RELOCK_URL": "redis://h/1", f"{before}RELOCK_TTL": 5}
    app.config_from_object(settings, namespace="SHOP")
    assert found(app) == ("redis://broker", "broker_read_url")
    assert read_by_tasks(app) == {}

    app.conf.update(settings)
    assert found(app) == ("redis://h/1", "relock_url")
    assert read_by_tasks(app) == {"ttl": 5}


def test_a_module_named_in_the_environment_configures(tmp_path: Path) -> None:
    (tmp_path / "shop_settings.py").write_text('relock_url = "redis://h/7"\nrelock_max_wait = 3\n')
    program = (
        "from celery import Celery\n"
        "from celery_relock.settings import read_by_tasks, backend_settings\n"
        "app = Celery('shop')\n"
        "app.config_from_envvar('SHOP_SETTINGS')\n"
        "print(backend_settings(app).url, read_by_tasks(app))\n"
    )
    environment = {
        "SHOP_SETTINGS": "shop_settings",
        "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
    }

    said = subprocess.run(
        [sys.executable, "-c", program], env=environment, text=True, capture_output=True, check=True
    )

    assert said.stdout.strip() == "redis://h/7 {'max_wait': 3}"


def test_the_environment_of_celery_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://environment/1")

    assert found(make(broker_url="redis://settings"))[0] == "redis://environment/1"


def test_reading_leaves_the_settings_of_the_app_alone() -> None:
    app = make(relock_ttl=5, broker_url="redis://h")
    before = dict(app.conf)

    backend_settings(app)
    read_by_tasks(app)

    assert dict(app.conf) == before


def test_every_option_has_an_app_wide_default() -> None:
    app = make(**{f"relock_{name}": name for name in OPTION_NAMES})

    assert read_by_tasks(app) == {name: name for name in OPTION_NAMES}


def test_a_default_of_none_is_a_default_and_no_default_is_none() -> None:
    assert read_by_tasks(make(relock_max_wait=None)) == {"max_wait": None}
    assert read_by_tasks(make()) == {}


@pytest.mark.parametrize("read", [backend_settings, read_by_tasks])
def test_an_option_of_a_task_among_the_settings_is_refused_with_the_name_of_its_default(read):
    app = make(broker_url="redis://h")
    app.conf["lock_ttl"] = 60

    with pytest.raises(LockConfigError, match=r"lock_ttl is an option of a task.* relock_ttl"):
        read(app)


@pytest.mark.parametrize("name", ["LOCK_TTL", "LOCK_LIMIT", "RELOCK_FOR_STAFF", "CELERY_RELOCK_X"])
@pytest.mark.parametrize("read", [backend_settings, read_by_tasks])
def test_a_setting_of_the_project_outside_of_the_namespace_is_none_of_ours(
    name: str, read: Any
) -> None:
    app = Celery("shop", broker="redis://h", set_as_current=False)
    app.config_from_object({name: 1, "SHOP_RELOCK_TTL": 5}, namespace="SHOP")

    read(app)
    assert read_by_tasks(app) == {"ttl": 5}


def test_an_empty_namespace_is_refused() -> None:
    with pytest.raises(LockConfigError, match="relock_namespace is empty"):
        backend_settings(make(broker_url="redis://h", relock_namespace=""))


@pytest.mark.parametrize("empty", ["", ";"])
def test_an_empty_url_is_refused(empty: str) -> None:
    with pytest.raises(LockConfigError, match="relock_url is empty"):
        backend_settings(make(broker_url="redis://h", relock_url=empty))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("relock_tll", "relock_ttl"),
        ("relock_uri", "relock_url"),
        ("relock_redis_url", "relock_url"),
        ("RELOCK_NAMESPAC", "RELOCK_NAMESPACE"),
        ("relock_lock_ttl", "relock_ttl"),
    ],
)
@pytest.mark.parametrize("read", [backend_settings, read_by_tasks])
def test_an_unknown_setting_is_refused_and_the_right_one_suggested(
    written: str, meant: str, read: Any
) -> None:
    app = make(broker_url="redis://h")
    app.conf[written] = 1

    with pytest.raises(LockConfigError, match=f"no option {written}. Did you mean {meant}"):
        read(app)


@pytest.mark.parametrize(
    ("written", "namespace", "meant"),
    [
        ("CELERY_RELOCK_TLL", "CELERY", "CELERY_RELOCK_TTL"),
        ("SHOP_RELOCK_TLL", "SHOP", "SHOP_RELOCK_TTL"),
        ("shop_relock_tll", "shop", "shop_relock_ttl"),
        ("CELERY_LOCK_TTL", "CELERY", "CELERY_RELOCK_TTL"),
        ("relock_tll", "CELERY", "relock_ttl"),
        ("lock_ttl", "CELERY", "relock_ttl"),
    ],
)
def test_an_unknown_setting_behind_a_namespace_is_refused_as_it_is_spelt(
    written: str, namespace: str, meant: str
) -> None:
    app = Celery("shop", set_as_current=False)
    app.config_from_object({written: 1}, namespace=namespace)

    with pytest.raises(LockConfigError, match=rf" {written}\b.* {meant}[.?]"):
        read_by_tasks(app)


def test_the_namespace_of_the_keys_is_a_setting() -> None:
    assert backend_settings(make(relock_url="redis://h")).namespace == "relock"
    assert backend_settings(make(relock_url="redis://h", relock_namespace="x")).namespace == "x"


@pytest.mark.parametrize("name", ["relock_url", "relock_namespace"])
def test_a_setting_that_must_be_text_says_so(name: str) -> None:
    with pytest.raises(LockConfigError, match=f"{name} must be text, not int"):
        backend_settings(make(broker_url="redis://h", **{name: 7}))


def test_relock_url_may_be_a_client_or_a_function_that_makes_one() -> None:
    client = redis.Redis(host="locks")

    for place in (client, lambda: client):
        settings = backend_settings(
            make(relock_url=place, relock_namespace="x", broker_url="amqp://")
        )
        assert (settings.url, settings.ssl, settings.namespace) == (place, None, "x")
        assert settings.source == "relock_url"


def test_a_relock_url_of_none_is_one_that_was_left_out() -> None:
    assert found(make(relock_url=None, broker_url="redis://b"))[0] == "redis://b"


TLS, OTHER = {"ssl_cert_reqs": "required"}, {"ssl_cert_reqs": "none"}


@pytest.mark.parametrize(
    ("settings", "ssl"),
    [
        ({"broker_url": "rediss://b", "broker_use_ssl": TLS, "redis_backend_use_ssl": OTHER}, TLS),
        ({"broker_url": "redis://b", "broker_use_ssl": True}, True),
        ({"broker_url": "redis://b", "redis_backend_use_ssl": OTHER}, None),
        ({"result_backend": "rediss://r", "redis_backend_use_ssl": TLS, "broker_use_ssl": 1}, TLS),
        ({"result_backend": "rediss://r", "broker_use_ssl": TLS}, None),
        ({"relock_url": "rediss://l", "redis_backend_use_ssl": TLS}, TLS),
        ({"relock_url": "rediss+cluster://l", "redis_backend_use_ssl": TLS}, TLS),
        ({"relock_url": "redis+cluster://l", "redis_backend_use_ssl": TLS}, None),
        ({"relock_url": "rediss://l", "relock_use_ssl": TLS, "redis_backend_use_ssl": OTHER}, TLS),
        ({"relock_url": "redis://l", "redis_backend_use_ssl": TLS}, None),
        ({"relock_url": "redis://l", "relock_use_ssl": True}, True),
        ({"relock_url": "redis://l", "relock_use_ssl": False}, None),
    ],
)
def test_the_tls_options_are_those_of_the_place_that_the_url_came_from(
    settings: dict[str, Any], ssl: Any
) -> None:
    assert backend_settings(make(**settings)).ssl == ssl


THREE = "sentinel://:p;w@a:1/2;sentinel://b:2;sentinel://c:3"
MASTER = {"master_name": "shop", "sentinel_kwargs": {"password": "s"}, "min_other_sentinels": 1}


@pytest.mark.parametrize(
    "written",
    [
        THREE,
        f"{THREE};",
        THREE.replace(";s", " s").split(),
        ["amqp://x", *THREE.replace(";s", " s").split()],
        THREE.replace("c:3", "c:3;sentinel://b:2"),
    ],
)
def test_sentinels_are_one_place_however_they_are_listed(written: Any) -> None:
    assert found(make(broker_url=written))[0] == THREE


def test_sentinels_and_another_redis_are_a_list_for_failover() -> None:
    assert found(make(broker_url="redis://a;sentinel://b"))[0] == "redis://a"
    assert found(make(broker_url="sentinel://b;redis://a;sentinel://c"))[0] == (
        "sentinel://b;sentinel://c"
    )


@pytest.mark.parametrize(
    ("settings", "transport"),
    [
        (
            {"broker_url": THREE, "broker_transport_options": {**MASTER, "priority_steps": 1}},
            MASTER,
        ),
        ({"broker_url": THREE, "result_backend_transport_options": MASTER}, None),
        ({"result_backend": THREE, "result_backend_transport_options": MASTER}, MASTER),
        ({"result_backend": THREE, "broker_transport_options": MASTER}, None),
        ({"relock_url": THREE, "broker_transport_options": MASTER}, None),
        (
            {"relock_url": THREE, "relock_transport_options": {**MASTER, "patience": 9}},
            {**MASTER, "patience": 9},
        ),
    ],
)
def test_the_transport_options_are_those_of_the_place_that_the_url_came_from(
    settings: dict[str, Any], transport: Any
) -> None:
    assert backend_settings(make(**settings)).transport == transport


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mastername": "shop"}, r"no option 'mastername'\. There are master_name, "),
        ("shop", "must be a dict, not str"),
    ],
)
def test_transport_options_that_cannot_be_used_are_told(options: Any, says: str) -> None:
    with pytest.raises(LockConfigError, match=says):
        backend_settings(make(relock_url=THREE, relock_transport_options=options))


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({"result_backend": "redis://r"}, "the locks live in the result_backend"),
        ({"broker_url": "redis://b"}, "the locks live in the broker_read_url"),
        ({"relock_url": redis.Redis}, "relock_url is a client"),
    ],
)
@pytest.mark.parametrize(
    "option", [{"relock_use_ssl": True}, {"relock_transport_options": {"patience": 5}}]
)
def test_options_of_a_relock_url_are_refused_without_it(
    place: dict[str, Any], says: str, option: dict[str, Any]
) -> None:
    ((name, _),) = option.items()
    with pytest.raises(LockConfigError, match=f"{name} is never used: {says}"):
        backend_settings(make(**place, **option))
    backend_settings(make(**place, **dict.fromkeys(option)))
    backend_settings(make(relock_url="memory://", **option))


@pytest.mark.parametrize(
    ("url", "read"),
    [
        *((url, ()) for url in ("redis://h", "REDISS://h", "unix:///run/redis.sock")),
        ("redis+cluster://h", ("patience",)),
        ("rediss+cluster://h", ("patience",)),
        *((url, (*MASTER, "patience")) for url in (THREE, "sentinel://h", "memory://")),
    ],
)
def test_transport_options_that_the_url_does_not_read_are_refused(
    url: str, read: tuple[str, ...]
) -> None:
    for name, value in {**MASTER, "patience": 5}.items():
        app = make(relock_url=url, relock_transport_options={name: value})
        if name in read:
            backend_settings(app)
        else:
            with pytest.raises(LockConfigError, match=f"relock_transport_options: {name} is never"):
                backend_settings(app)
        backend_settings(make(relock_url=url, relock_transport_options={name: None}))


def test_how_many_replicas_have_to_have_a_hold_is_a_setting() -> None:
    assert backend_settings(make(relock_url="redis://h")).replicas == (0, 1.0)
    client = redis.Redis(host="locks")
    for place in ("redis://h", client):
        app = make(relock_url=place, relock_min_replicas=2, relock_min_replicas_timeout=3)
        assert backend_settings(app).replicas == (2, 3.0)


def test_the_end_of_an_execution_is_remembered_beyond_the_brokers_visibility_timeout() -> None:
    late = {"visibility_timeout": 43_200}
    found = backend_settings(make(relock_url="redis://h", broker_transport_options=late))
    assert found.remember == 43_800.0
    never = {"visibility_timeout": 999_999_999}
    found = backend_settings(make(relock_url="redis://h", broker_transport_options=never))
    assert found.remember == 1_000_000_599.0


def test_what_may_pile_up_is_a_setting() -> None:
    found = backend_settings(make(relock_url="redis://h"))
    assert (found.remember, found.most_parked) == (4200.0, (1_000_000, 1_000_000_000))
    more = {"relock_max_parked_messages": 7, "relock_max_parked_bytes": 9}
    more |= {"relock_remember": timedelta(minutes=1)}
    found = backend_settings(make(relock_url="redis://h", **more))
    assert (found.remember, found.most_parked) == (60.0, (7, 9))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("relock_min_replicas", -1),
        ("relock_min_replicas", True),
        ("relock_min_replicas", "1"),
        ("relock_min_replicas_timeout", 0),
        ("relock_min_replicas_timeout", "soon"),
        ("relock_min_replicas_timeout", float("nan")),
        ("relock_min_replicas_timeout", float("inf")),
        ("relock_remember", 0),
        ("relock_remember", "1h"),
        ("relock_remember", 999_999_999),
        ("relock_max_parked_messages", 0.5),
        ("relock_max_parked_bytes", -1),
    ],
)
def test_a_number_that_cannot_be_used_is_told(name: str, value: Any) -> None:
    with pytest.raises(LockConfigError, match=f"{name}={value!r}"):
        backend_settings(make(relock_url="redis://h", **{name: value}))
