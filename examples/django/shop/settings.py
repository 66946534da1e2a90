import os
from pathlib import Path

BASE_DIR = Path(__file__).parents[1]
FEEDS = BASE_DIR / "feeds"

SECRET_KEY = os.environ.get("SECRET_KEY", "for your own machine alone")
DEBUG = "SECRET_KEY" not in os.environ
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "localhost,127.0.0.1").split(",")

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "celery_relock.contrib.django",  # its migration makes the table of fencing tokens
    "shop",
]
ROOT_URLCONF = "shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
TIME_ZONE = "UTC"

if "PGHOST" in os.environ:  # libpq reads user and password from the environment by itself
    DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "NAME": "shop"}}
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": os.environ.get("DATABASE", BASE_DIR / "shop.sqlite3"),
            # Two writers wait for each other, instead of one of them failing.
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        }
    }

REDIS_URL = os.environ.get("REDIS_URL", "redis://localhost:6379/0")
CELERY_BROKER_URL = REDIS_URL
CELERY_RESULT_BACKEND = REDIS_URL
CELERY_RELOCK_NAMESPACE = "shop"
# A task whose process is killed runs again at once; if its machine is gone, after 10 minutes.
# A longer task is delivered a second time then; the copy waits for the lock and is discarded.
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 600}
CELERY_BEAT_SCHEDULE = {
    "import": {"task": "shop.tasks.import_stock", "schedule": 60.0, "args": ["acme"]},
}
