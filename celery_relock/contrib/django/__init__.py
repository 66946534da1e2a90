"""The Django app: `INSTALLED_APPS = [..., "celery_relock.contrib.django"]`."""
