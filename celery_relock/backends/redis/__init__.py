"""Locks in Redis: the only code that talks to it, through redis-py's public interface alone."""
