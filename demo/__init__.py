"""`make demo`: the locks at work, on a real Redis and a real worker."""
