"""The Django app: `INSTALLED_APPS = [..., "celery_relock.contrib.django"]`.

It brings the table for `self.lock.fenced(connection)`, and a page in the admin that shows locks and
frees them, for users with the permissions `view_lock` and `free_lock`.
"""
