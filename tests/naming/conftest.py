from __future__ import annotations

from hypothesis import HealthCheck, settings

# On a busy machine to make an example takes long, which says nothing about the example.
settings.register_profile("naming", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("naming")
