"""From a call of a task to the names of its locks."""
