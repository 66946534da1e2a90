"""The lock engine: what a lock is, who may enter, how a hold is kept and lost.

Standard library only; it knows neither Celery nor Redis. `store.LockStore` is the seam to Redis.
"""
