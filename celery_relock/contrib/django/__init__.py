"""The Django app: `INSTALLED_APPS = [..., "celery_relock.contrib.django"]`.

It brings the table for `self.lock.fenced(connection)`; a page in the admin that shows locks and
frees them, for users with the permissions `view_lock` and `free_lock`; and a check of how the Redis
of the locks is set up (`manage.py check --deploy`).
"""
