"""Ports for servers of the tests."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_LOCAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_BUS = 10_000


def free_port(bus: bool = False) -> int:
    """A port of 127.0.0.1 that nobody has; with `bus` the one 10000 above is free as well, at which
    a node of a cluster speaks to the others.

    Below those that the system gives to outgoing connections: one of these could take the port
    before its server does, or while that is down.
    """
    highest = int(_LOCAL.read_text().split()[0]) if _LOCAL.exists() else 32_768
    while True:
        # Not as `random` was seeded: the processes of one run would choose the same.
        port = random.SystemRandom().randrange(_BUS, highest - _BUS)
        with contextlib.suppress(OSError), socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", port))
            if bus:
                other.bind(("127.0.0.1", port + _BUS))
            return port
