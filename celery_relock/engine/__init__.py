"""The lock engine: what a lock is, who may acquire and re-enter, how a hold is kept and lost.

Standard library only: the engine knows neither Celery nor Redis. `protocol.Backend` is the seam to
Redis.
"""
