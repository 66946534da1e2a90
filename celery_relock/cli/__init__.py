"""`celery relock …`: see, release and watch locks.

Celery loads this module whenever the `celery` command runs, in workers too. So it imports nothing
of the library: the file of a command is loaded when the command is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

# The file of each command, in the order of the help.
_COMMANDS: dict[str, str] = {
    **dict.fromkeys(("ls", "show", "why", "release", "cancel", "stats"), ".commands"),
    "watch": ".watch",
    "doctor": ".doctor",
    "exporter": ".exporter",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        file = _COMMANDS.get(cmd_name)
        if file is None:
            return None
        found: click.Command = getattr(import_module(file, __name__), cmd_name)
        return found


@click.group("relock", cls=_Lazy)
def relock(**_: Any) -> None:
    """See, release and watch the locks of celery-relock."""
