"""What the users of other libraries for unique tasks complain about, and celery-relock does not do.

`python -m tests.peers` shows the same for the others.
"""

from __future__ import annotations

import pytest

from tests.peers.bench import Bench
from tests.peers.scenarios import SCENARIOS
from tests.support.worker import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(redis_server):
    opened = Bench(redis_server.url, "celery-relock")
    yield opened
    print(opened.worker.log())
    opened.close()


def test_the_table_on_the_page_has_a_row_for_each_scenario():
    text = (ROOT / "docs" / "other-libraries.md").read_text("utf-8")
    measured, _ = text.split("\nMeasured with")
    _, _, *rows = [line for line in measured.splitlines() if line[:1] == "|"]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [title for title, *_ in cells] == [*SCENARIOS]
    assert {ours for *_, ours in cells} == {"ok"}


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.parametrize("title", SCENARIOS)
def test_no_defect(bench, title):
    SCENARIOS[title](bench)
