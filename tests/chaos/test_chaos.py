"""The short form of `scripts/chaos`."""

from __future__ import annotations

import pytest

from tests.chaos.campaign import Campaign


@pytest.mark.slow
def test_no_permit_overlaps_another_and_no_fenced_update_is_lost_whatever_is_done_to_the_system(
    redis_binary: str,
) -> None:
    report = Campaign(seconds=10, processes=6, threads=2, lease=0.8, seed=1).run()
    assert report.violations == []
    assert len(report.faults) == 8, f"not every kind of fault was tried: {report.faults}"
    # Enough happened for the verdict to mean something.
    assert report.entries > 100
    assert report.writes["fenced"] > 50
    assert report.outcomes["released"] > 100
    assert report.outcomes["lost"] > 0
    assert report.shared > 20
    assert report.most_beside > 1
