"""The short form of `scripts/parked`."""

from __future__ import annotations

import pytest

from tests.chaos.parked.campaign import Campaign


@pytest.mark.slow
def test_no_parked_execution_is_lost_or_overlaps_another_whoever_is_killed_at_whatever_step(
    redis_binary: str,
) -> None:
    # One round of faults, without cutting off the broker: Celery's own Redis transport loses a
    # message now and then when that is done.
    report = Campaign(tasks=200, keys=3, faults=14, workers=2, cut_broker=False).run()
    assert report.violations == []
    # On a busy machine the work may be over before the last of them.
    assert report.killed >= 8, f"too few kinds of fault were tried: {report.faults}"
    # Nearly every run was parked before it entered.
    assert report.deliveries > 1.5 * report.sent
