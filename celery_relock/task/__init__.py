"""The Celery glue: which lock a task needs, who its owner is, what a conflict does to its run."""
