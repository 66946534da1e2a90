"""The Django app: `INSTALLED_APPS = [..., "celery_relock.contrib.django"]`.

It provides the table for `self.lock.fenced(connection)`; a page in the admin that shows and
releases locks, for users with the permissions `view_lock` and `free_lock`; and a check of the
settings and the Redis of the locks (`manage.py check --deploy`).
"""
