"""The only code that talks to Redis: connections, keys, scripts, and verbs turned into answers."""
