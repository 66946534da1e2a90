"""Settings of the Django project that the `django` companion is."""

import os

SECRET_KEY = "company"
INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django_celery_results",
    "django_celery_beat",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("RELOCK_COMPANY_DATABASE", ":memory:"),
        "OPTIONS": {"timeout": 20},
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
USE_TZ = True
TIME_ZONE = "UTC"
