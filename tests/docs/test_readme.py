"""The README is short, and what it shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, URL, blocks, text
from tests.support import Worker

pytestmark = pytest.mark.slow

SITE = "https://celery-relock.readthedocs.io/en/latest/"
README = text("README")


def test_it_is_short() -> None:
    assert len(README) <= 5000


@pytest.mark.parametrize("page", ["README", "quickstart"])
def test_the_file_of_the_page_runs_and_prints_what_the_page_shows(
    page: str,
    redis_url: str,
    namespace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = max(blocks(page), key=len)
    settings = f'app.conf.update(relock_namespace="{namespace}", task_default_queue="{namespace}")'
    code = code.replace(URL, redis_url).replace("\n@app.task", f"\n{settings}\n\n@app.task", 1)
    (tmp_path / "shop.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Not from a process that knows the shop of the other page.
    worker = Worker("shop", redis_url, namespace, env={"PYTHONPATH": str(tmp_path)})
    try:
        exec(code, {"__name__": "__main__"})
    finally:
        worker.close()

    shown = next(block for block in blocks(page, "console") if "python shop.py" in block)
    said = capsys.readouterr().out
    accounts = re.compile(r"^account (\d+): \d\d:\d\d:\d\d to \d\d:\d\d:\d\d$", re.MULTILINE)
    assert accounts.findall(said) == accounts.findall(shown) == ["42", "42", "7"]
    (_, ends), (begins, _) = re.findall(r"account 42: (\S+) to (\S+)", said)
    assert ends <= begins, "two tasks of one account ran at the same time"


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
