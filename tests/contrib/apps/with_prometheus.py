"""What a worker that serves metrics imports."""

from __future__ import annotations

import os

from celery_relock.contrib import prometheus

prometheus.instrument(port=int(os.environ["TEST_METRICS_PORT"]), addr="127.0.0.1", templates=True)
