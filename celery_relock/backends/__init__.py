"""Where locks live. Each folder is one backend of the engine."""
