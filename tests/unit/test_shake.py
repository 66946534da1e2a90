"""`scripts/shake` stops the processes of a command now and then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHAKE = Path(__file__).parents[2] / "scripts" / "shake"
GOES_ON = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})
sys.exit(3 if signal.sigtimedwait({signal.SIGCONT}, 60) else 4)
"""


@pytest.mark.parametrize("which", [(), ("--together",)], ids=["one", "together"])
def test_a_command_is_stopped_and_goes_on_and_ends_with_its_own_status(which: tuple[str, ...]):
    # A process below the command is stopped, too.
    within = (
        f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {GOES_ON!r}]))"
    )
    command = [SHAKE, *which, "--rate", "5", "--pause", "0.2", sys.executable, "-c", within]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 3, ran.stderr
    assert int(ran.stderr.split()[-2]) > 0
