"""The backends: where locks live."""
