"""The README is short, and its links lead somewhere. That what it shows is what happens is seen in
tests/unit/test_packaging.py, with the wheel."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, blocks, text

SITE = "https://celery-relock.readthedocs.io/en/latest/"
README = text("README")


def test_it_is_short() -> None:
    assert len(README) <= 5000


def test_the_two_pages_show_the_same_file() -> None:
    readme, quickstart = (max(blocks(page), key=len) for page in ("README", "quickstart"))

    assert quickstart.removeprefix("# shop.py\n") == readme


def test_every_link_is_absolute_and_leads_to_a_page_of_the_site() -> None:
    targets = re.findall(r"\]\(([^)]+)\)|^\[\w+\]: (\S+)$", README, flags=re.MULTILINE)
    links = [first or second for first, second in targets]

    assert len(links) > 8
    for link in links:
        assert link.startswith("https://"), link
        page, _, anchor = link.removeprefix(SITE).partition("#")
        if not link.startswith(SITE) or page.startswith("_images/"):
            continue
        source = (DOCS / page.replace(".html", ".md")).read_text()
        headings = re.findall(r"^#+ (.+)$", source, flags=re.MULTILINE)
        assert not anchor or anchor in [_slug(each) for each in headings], link


def test_its_picture_is_one_of_the_site() -> None:
    (picture,) = re.findall(r"_images/(\S+\.svg)", README)

    assert (DOCS / "pictures" / picture).exists()


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
