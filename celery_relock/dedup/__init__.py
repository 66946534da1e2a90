"""`lock_dedup`: a call that is queued or runs is not sent a second time."""
