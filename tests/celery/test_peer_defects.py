"""What the users of other libraries for unique tasks complain about, and celery-relock does not do.

`python -m tests.peers` shows the same for the others.
"""

from __future__ import annotations

import pytest

from tests.peers.bench import Bench
from tests.peers.scenarios import SCENARIOS


@pytest.fixture(scope="module")
def bench(redis_server):
    opened = Bench(redis_server.url, "celery-relock")
    yield opened
    print(opened.worker.log())
    opened.close()


# Celery's own, where it stores a result in the process of the test.
@pytest.mark.filterwarnings("ignore:Call to deprecated setex")
@pytest.mark.parametrize("title", SCENARIOS)
def test_no_defect(bench, title):
    SCENARIOS[title](bench)
