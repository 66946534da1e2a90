"""The table of the fencing tokens."""
