"""Measurements of the lock, beside other Redis locks."""
