from __future__ import annotations

import base64
import os
import re
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_relock.engine import ids

URL_SAFE = re.compile(r"[A-Za-z0-9_-]+")


@pytest.mark.parametrize(("make", "length"), [(ids.new_id, 22), (ids.new_attempt_id, 8)])
def test_random_ids_have_their_length_and_do_not_repeat(make, length: int) -> None:
    made = {make() for _ in range(10_000)}

    assert len(made) == 10_000
    assert all(len(one) == length and URL_SAFE.fullmatch(one) for one in made)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_draws_other_ids_than_its_parent() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, f"{ids.new_id()} {ids.new_attempt_id()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reader, 100).decode().split()
    os.close(reader)
    os.close(writer)

    assert len(theirs) == 2
    assert not {ids.new_id(), ids.new_attempt_id()} & set(theirs)


def test_a_uuid_becomes_the_base64_of_its_bytes() -> None:
    one = uuid.UUID("0f8fad5b-d9cb-469f-a165-70867728950e")

    assert ids.short(str(one)) == base64.urlsafe_b64encode(one.bytes).decode().rstrip("=")


@pytest.mark.parametrize("text", ["a", "order-42", "queue:7", "job.3_x", "A" * 22])
def test_a_short_plain_text_is_kept(text: str) -> None:
    assert ids.short(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "a b", "a\n", "ä", "a" * 23, "\ud800", "0F8FAD5B-D9CB-469F-A165-70867728950E"],
)
def test_any_other_text_becomes_a_digest(text: str) -> None:
    made = ids.short(text)

    assert len(made) == 22
    assert URL_SAFE.fullmatch(made)
    assert made != text


def test_only_the_canonical_text_of_a_uuid_is_taken_for_one() -> None:
    one = "0f8fad5b-d9cb-469f-a165-70867728950e"
    forms = [one, one.upper(), one + "\n", f"{{{one}}}", one.replace("-", ""), f"urn:uuid:{one}"]

    assert len({ids.short(form) for form in forms}) == len(forms)


def test_an_id_that_is_short_already_comes_back_unchanged() -> None:
    for made in (
        ids.new_id(),
        ids.new_attempt_id(),
        ids.short(str(uuid.uuid4())),
        ids.short("x" * 100),
    ):
        assert ids.short(made) == made


@given(st.lists(st.one_of(st.text(), st.uuids().map(str)), unique=True, min_size=2))
def test_different_texts_get_different_ids_of_at_most_22_bytes(texts: list[str]) -> None:
    made = [ids.short(text) for text in texts]

    assert len(set(made)) == len(texts)
    assert all(1 <= len(one.encode()) <= 22 and " " not in one for one in made)


@given(st.one_of(st.text(), st.uuids().map(str), st.binary(min_size=16, max_size=16)))
def test_the_whole_id_leads_back_to_the_short_one(text: str | bytes) -> None:
    short = ids.short(text) if isinstance(text, str) else ids.base64_text(text)

    assert ids.short(ids.full(short)) == short


@given(st.uuids().map(str))
def test_a_uuid_comes_back_whole(text: str) -> None:
    assert ids.full(ids.short(text)) == text


@pytest.mark.parametrize("text", ["", "order-42", "abcdefghijklmnopqrstuv"])
def test_an_id_of_another_form_is_whole_already(text: str) -> None:
    assert ids.full(text) == text
