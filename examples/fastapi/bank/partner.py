"""Stands for the client of the bank that carries out your payments."""

import time


def transfer(key: str, cents: int) -> None:
    """Send money. The partner takes a second transfer with the same key for the first one."""
    time.sleep(0.5)


def cancel(key: str) -> None:
    """Call a transfer back. Without such a transfer nothing happens."""
