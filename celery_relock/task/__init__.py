"""The Celery glue: which lock a task needs, who its owner is, and what a conflict does to its run."""
