"""`manage.py check --deploy`: the settings of the locks, and how their Redis is set up."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.core import checks


@checks.register("relock", deploy=True)  # type: ignore[untyped-decorator]
def check_locks(**_: Any) -> list[Any]:
    """The quick checks of `celery relock doctor`, which do not ask the workers."""
    from ... import doctor
    from ...engine.diagnosis import ERROR, WARNING
    from ...errors import LockConfigError

    config = apps.get_app_config("celery_relock")
    try:
        config.check_app()
    except LockConfigError as error:
        return [checks.Error(str(error), id="relock.app")]
    levels = {ERROR: checks.Error, WARNING: checks.Warning}
    return [
        levels.get(finding.severity, checks.Info)(
            f"{finding.what}. {finding.why}", hint=finding.do, id=f"relock.{finding.check}"
        )
        for finding in doctor.quick(config.celery)
    ]
