"""Measures the lock beside other Redis locks."""
