"""What is resumed is what was received: the message, and nothing of who resumes it."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import uuid
from base64 import b64decode
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace

import pytest
from celery import VERSION, Celery, chain, chord, group
from celery.app.task import Context
from kombu.message import Message as Received
from kombu.utils.json import dumps

from celery_relock.engine import ids
from celery_relock.worker import parking
from celery_relock.worker.message import Header, parse
from celery_relock.worker.parking import CARRIED, Carried, RawMessage, carried, parked_text, publish
from tests.support import new_namespace, wait_for

pytestmark = pytest.mark.slow

# Celery 5.4 can read no certificate: it compares its time, which has no zone, with one that has.
CAN_SIGN = VERSION >= (5, 5)


def _soon():
    return (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder with a signer's certificate, and the signer; None without `cryptography`."""
    folder = tmp_path_factory.mktemp("certificates")
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sender")])
    now = datetime.now(timezone.utc)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    made = made.public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    certificate = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    (folder / "sender.pem").write_bytes(certificate)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    secret = key.private_bytes(*form, serialization.NoEncryption())
    return SimpleNamespace(folder=folder, key=secret.decode(), certificate=certificate.decode())


PLACES = [("redis", "prefork"), ("redis", "threads"), ("amqp", "prefork"), ("amqp", "threads")]


@pytest.fixture(scope="module", params=PLACES, ids="-".join)
def worker(request, module_worker, on_broker, certificates):
    broker, pool = request.param
    env = on_broker(broker)
    if CAN_SIGN:
        env["RELOCK_TEST_CERTIFICATES"] = str(certificates.folder)
    namespace = new_namespace()
    return module_worker("tests.worker.apps.mirror", pool=pool, env=env, namespace=namespace)


@pytest.fixture
def signed(certificates):
    """The test can sign: what the worker cannot."""
    if not CAN_SIGN:
        pytest.skip("Celery 5.4 can read no certificate")
    from celery.security.serialization import register_auth
    from kombu.serialization import registry

    register_auth(certificates.key, None, certificates.certificate, str(certificates.folder))
    yield
    registry.unregister("auth")


def deliveries(worker, task_id, count=2):
    """What the worker received for a task, without the library's own header."""
    events = worker.journal.wait_for("received", count=count, id=task_id)
    raws = [pickle.loads(b64decode(event["raw"])) for event in events]
    for raw in raws:
        raw["headers"].pop("relock", None)
    return raws


def assert_the_same(worker, task_id):
    first, second = deliveries(worker, task_id)
    assert second == first
    return first


KINDS = {
    "json": {},
    "no priority": {"priority": None},
    "priority": {"priority": 3},
    "pickle": {"serializer": "pickle"},
    "msgpack": {"serializer": "msgpack"},
    "yaml": {"serializer": "yaml"},
    "zlib": {"compression": "zlib"},
    "bzip2 of pickle": {"compression": "bzip2", "serializer": "pickle"},
    "masked": {"argsrepr": "(<secret>,)", "kwargsrepr": "{'card': '***'}"},
    "expires": {"expires": 60},
    "expires at": {"expires": _soon()},
    "headers": {"headers": {"x-mine": ["a", {"b": 1}], "args": "A", "chain": "C", "hostname": "H"}},
    "stamps": {"stamped_headers": ["stamp", "other"], "stamp": "of mine", "other": ["a", "b"]},
    "limits": {"time_limit": 50, "soft_time_limit": 40},
    "shadow": {"shadow": "another name"},
    "reply to": {"reply_to": "somebody"},
    "countdown": {"countdown": 0.1},
    "retries": {"retries": 2},
    "ignored result": {"ignore_result": True},
    "not persistent": {"delivery_mode": 1},
    "family": {"root_id": "the-root", "parent_id": "the-parent"},
    "expiration": {"expiration": 61},
    "properties": {"message_id": "M", "app_id": "A", "type": "T", "timestamp": 1_700_000_000},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_message_comes_again_as_it_was(worker, kind):
    options = KINDS[kind]
    if options.get("serializer") in ("msgpack", "yaml"):
        pytest.importorskip(options["serializer"])
    result = worker.module.mirror.apply_async(("ä€😀", 1.5), {"b": [None, True]}, **options)
    first = assert_the_same(worker, result.id)
    if kind in ("zlib", "bzip2 of pickle"):
        assert first["headers"]["compression"]
    if not options.get("ignore_result"):
        assert result.get(timeout=30)[0] == "('ä€😀', 1.5)"


def test_arguments_of_any_kind_and_size_come_again_as_they_were(worker):
    sent = {
        "objects": ((SimpleNamespace(a=1), {1, 2}, b"\x00\xff"), {"serializer": "pickle"}),
        "large": (("x" * 300_000,), {}),
        "large and binary": ((bytes(range(256)) * 1000,), {"serializer": "pickle"}),
        "strange": (('\x00"\\\u2028\u007f',), {}),
        "times": ((datetime(2026, 1, 1), Decimal("1.10"), uuid.UUID(int=7)), {}),
    }
    for args, options in sent.values():
        assert_the_same(worker, worker.module.mirror.apply_async(args, **options).id)


def test_a_signed_message_keeps_its_signature(worker, signed):
    result = worker.module.mirror.apply_async(("signed",), serializer="auth")
    assert_the_same(worker, result.id)
    assert result.get(timeout=30)[0] == "('signed',)"


def test_canvases_stay_whole(worker):
    m = worker.module
    whole = chord([m.mirror.s(n) for n in range(3)], m.total.s())()
    steps = chain(m.mirror.si(1), m.mirror.si(2), m.total.s())()
    linked = m.mirror.apply_async(link=m.note.s("linked"), link_error=m.note.s("never"))
    grouped = group(m.mirror.si(n) for n in range(2))()
    assert whole.get(timeout=30) == 3
    assert steps.get(timeout=30) == 2
    assert len(grouped.get(timeout=30)) == 2
    linked.get(timeout=30)
    worker.journal.wait_for("noted")
    for result in (*whole.parent.results, *grouped.results, steps.parent, linked):
        assert_the_same(worker, result.id)


def test_a_retry_of_what_was_published_again_goes_on_counting(worker):
    result = worker.module.retries.apply_async((1,), retries=1)
    assert result.get(timeout=30) == 3
    counts = [d["headers"]["retries"] for d in deliveries(worker, result.id, 4)]
    assert counts[:2] == [1, 1]
    assert counts[-1] == 3


def test_no_publish_handler_no_override_and_no_context_has_a_part_in_it(worker):
    assert_the_same(worker, worker.module.mirror.delay().id)
    assert "handled" not in worker.journal.names()
    assert "overridden" not in worker.journal.names()


# --- without a worker


@pytest.fixture
def app(redis_url, namespace, monkeypatch):
    monkeypatch.setenv("RELOCK_TEST_URL", redis_url)
    monkeypatch.setenv("RELOCK_TEST_NAMESPACE", namespace)
    from tests.support import make_app

    with make_app("of-parking") as app:
        yield app


def message(body=b"[[], {}, {}]", headers=(), properties=(), **facts):
    base = {
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"task": "t", "id": "i", **dict(headers)},
        "properties": {"priority": 0, "delivery_mode": 2, **dict(properties)},
        "exchange": "",
        "routing_key": "q",
    }
    return RawMessage(body, **{**base, **facts})


def published(app, queue):
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        wait_for(lambda: channel._size(queue))
        return channel.basic_get(queue, no_ack=True)


def test_a_request_without_a_message_has_none_kept():
    assert carried(SimpleNamespace(properties=None, delivery_info=None)) is None
    assert carried(SimpleNamespace(properties={CARRIED: "?"}, delivery_info=None)) is None


def test_a_message_that_came_without_task_received_stays_with_its_worker_which_says_so(app, caplog):
    @app.task(bind=True)
    def task(self):
        return None

    request = Context(id="i", args=(), kwargs={})
    assert parking.park_request(task, request, Header(execution_id="e")) is None
    assert not parking.send_again(task, request, 1.0)
    assert caplog.text.count("without the signal task_received") == 2


def test_what_is_too_large_is_refused_and_the_log_says_so(app, caplog):
    assert parked_text(app, message(b"x" * 999_000), {}) is not None
    assert parked_text(app, message(b"x" * parking.LARGEST), {}) is None
    assert "larger than 1000000 bytes" in caplog.text
    # In bytes, not in characters.
    assert parked_text(app, message(("€" * 400_000).encode()), {}) is None


def test_a_header_that_cannot_be_written_is_refused(app, caplog):
    assert parked_text(app, message(headers={"x": object()}), {}) is None
    assert "cannot be written" in caplog.text


def test_only_our_header_is_renewed(app):
    old = message(headers={"relock": {"v": 1, "attempts": 1}, "x": b"\xff"})
    publish(app, parked_text(app, old, {"v": 1, "attempts": 2}), queue="q")
    found = published(app, "q")
    assert found.headers.pop(parking.ORIGIN) == ["", "q", ""]
    assert found.headers == {
        "task": "t",
        "id": "i",
        "relock": {"v": 1, "attempts": 2},
        "x": b"\xff",
    }
    # It was the sender's mapping.
    assert old.headers["relock"]["attempts"] == 1


def test_a_broker_that_does_not_answer_holds_up_nobody_without_a_bound(app, monkeypatch):
    monkeypatch.setattr(parking, "_PUBLISHING", 0.3)
    text = parked_text(app, message(), {})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setitem(app.conf, "broker_url", f"redis://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(TimeoutError, match="the broker has not answered"):
            publish(app, text)


def test_a_broker_that_blocks_all_who_publish_does_not_get_more_and_more_connections(
    app, monkeypatch
):
    text, goes_on, tries = parked_text(app, message(), {}), threading.Event(), []

    def blocks(*_):
        tries.append(1)
        goes_on.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(parking, "_PUBLISHING", 0.1)
        patch.setattr(parking, "_publish", blocks)
        for _ in range(30):
            with pytest.raises(TimeoutError, match="the broker has not answered"):
                publish(app, text)
        assert 2 <= len(tries) <= 4
    goes_on.set()
    hung, _ = parking._hung[app]
    wait_for(lambda: not any(each.is_alive() for each in hung), what="the end of what hung")
    publish(app, text)
    assert published(app, "q")


@pytest.mark.parametrize("sent", ["1", "999", "61000", "2147483647"])
def test_an_expiration_stays_to_the_millisecond(app, sent):
    publish(app, parked_text(app, message(properties={"expiration": sent}), {}))
    assert published(app, "q").properties["expiration"] == sent


def test_a_delay_is_an_eta_in_the_header_and_the_rest_stays(app):
    before = datetime.now(timezone.utc)
    text = parked_text(app, message(headers={"eta": None, "expires": "E"}), {"v": 1})
    publish(app, text, delay=30)
    found = published(app, "q")
    eta = datetime.fromisoformat(found.headers["eta"])
    assert timedelta(seconds=29) < eta - before < timedelta(seconds=32)
    assert found.headers["expires"] == "E"
    assert found.body == b"[[], {}, {}]"


def test_what_rabbitmq_noted_of_dead_letters_is_kept_and_its_count_of_deliveries_is_not(app):
    counts = {"x-delivery-count": 2, "x-acquired-count": 3}
    deaths = {"x-death": [{"queue": "theirs", "count": 1}], **counts}
    publish(app, parked_text(app, message(headers=deaths), {}), queue="q.resumed")
    found = published(app, "q.resumed")
    assert found.headers["x-death"] == deaths["x-death"]
    assert not counts.keys() & found.headers.keys()
    parking.come_back(found)
    info = found.delivery_info
    assert (info["exchange"], info["routing_key"], info["queue"]) == ("", "q", "")


def test_what_sqs_was_told_for_one_message_is_not_told_for_the_next(app):
    told = {"MessageGroupId": "g", "MessageDeduplicationId": "d", "DelaySeconds": 60}
    text = parked_text(app, message(properties={**told, "delay_seconds": 60}), {})
    assert json.loads(text)["properties"].keys() - message().properties == {"MessageGroupId"}


def test_a_header_says_what_is_not_as_it_is_without_it():
    header = Header("e", attempts=2, kept=(("a", 1),))
    assert header.content() == {
        "v": 2,
        "execution_id": "e",
        "attempts": 2,
        "kept": (("a", 1),),
    }
    assert parse(header.content()) == header


@pytest.mark.parametrize("junk", [None, 7, [], ["a"], {"a": 1}])
def test_a_forged_origin_changes_nothing(junk):
    came = {"exchange": "e", "routing_key": "k"}
    found = Received(headers={parking.ORIGIN: junk}, delivery_info=dict(came))
    parking.come_back(found)
    assert found.delivery_info == came


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.#", "a.b.c", True),
        ("a.#", "a", True),
        ("#", "", True),
        ("#.c", "a.b.c", True),
        ("*.b.#", "a.c", False),
    ],
)
def test_topics_fit_as_amqp_says(pattern, key, fits):
    assert parking._fits(pattern.split("."), key.split(".")) is fits


def test_what_is_kept_is_a_text_without_arguments_for_whoever_writes_a_request():
    secret = Carried(message(b'[["4111 1111"], {}, {}]', headers={"a": 1}, queue="q"))
    for written in (repr(secret), str(secret), json.dumps({"kept": secret}), dumps([secret])):
        assert "<message of 23 bytes>" in written
        assert "4111" not in written
    again = pickle.loads(pickle.dumps(secret))
    assert carried(SimpleNamespace(properties={CARRIED: again})) == secret.message


def test_homes_differ_by_app_and_broker_and_tell_nothing(app, redis_url):
    here = parking.home(app)
    assert here == parking.home(app)
    with Celery("of-parking", broker="redis://:secret@other:6379/0") as elsewhere:
        assert parking.home(elsewhere) != here
        assert "secret" not in parking.home(elsewhere)
    with Celery("another", broker=redis_url) as other:
        assert parking.home(other) != here


@pytest.mark.parametrize(
    ("broker", "place"),
    [
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://:secret@host:1/0", "redis://host:1/0"),
        ("rediss://user:secret@host/0", "rediss://host:6379/0"),
        ("sentinel://a:26379/1;sentinel://b:26379/1", "sentinel://a:26379/1"),
        ("amqp://user:secret@host//", "amqp://host:5672//"),
        ("amqp://host//", "amqp://host:5672//"),
    ],
)
def test_a_home_is_the_same_with_every_kombu_and_every_login(broker, place):
    # What the worker of one release has parked, that of the next one resumes.
    with Celery("shop", broker=broker) as app:
        assert parking.home(app) == ids.digest(repr(("shop", place)).encode())


def test_a_process_publishes_what_was_parked_for_one_address_of_its_broker():
    first, other, alone = (
        Celery("of-a-list", broker=f"amqp://{hosts}", set_as_current=False)
        for hosts in ("u:p@a//;amqp://u:p@b//", "b//;amqp://a//", "b//")
    )
    assert parking.home(first) != parking.home(other) == parking.home(alone)
    assert parking.homes(first) == parking.homes(other) > parking.homes(alone)


@pytest.mark.parametrize("option", ["global_keyprefix", "queue_name_prefix"])
def test_homes_differ_by_the_prefix_of_the_queues_and_by_no_other_option(app, option):
    def home(**options):
        made = Celery(app.main, broker=app.conf.broker_url, broker_transport_options=options)
        with made:
            return parking.home(made)

    assert len({home(**{option: name}) for name in ("staging:", "production:")}) == 2
    assert home(**{option: ""}) == home(visibility_timeout=5) == home()
