"""Which process this is, without a question to the kernel at each look."""

from __future__ import annotations

import os

#: The pid of this process, also in a forked child.
pid = os.getpid()


def _forked() -> None:
    global pid
    pid = os.getpid()


os.register_at_fork(after_in_child=_forked)
