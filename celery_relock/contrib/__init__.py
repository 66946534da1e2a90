"""For other software: each module is imported only by those who use it."""
