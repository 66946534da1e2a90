"""An app in a Django project: Celery sets Django up with the app's modules. The results can be read
only then, as those of django-celery-results."""

from __future__ import annotations

import os
from typing import Any

from celery.backends.redis import RedisBackend
from django.apps import apps

from tests.support import make_app

os.environ["DJANGO_SETTINGS_MODULE"] = __name__
SECRET_KEY = "a setting of Django"


class InDjango(RedisBackend):
    def get_task_meta(self, *args: Any, **options: Any) -> Any:
        apps.check_apps_ready()
        return super().get_task_meta(*args, **options)


url = os.environ["RELOCK_TEST_URL"]
app = make_app(__name__, result_backend=f"{__name__}:InDjango+{url}")
