"""Stands for the client of your payment provider."""

import time


def charge(key: str, cents: int) -> str:
    """Charge the card. The provider takes a second charge with the same key for the first one."""
    time.sleep(0.5)
    return f"pay_{key}"


def cancel(key: str) -> None:
    """Return the money of the charge with this key. Without such a charge nothing happens."""
