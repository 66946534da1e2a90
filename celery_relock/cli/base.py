"""What all commands share: finding the locks, text or JSON, errors, exit codes."""

from __future__ import annotations

import errno
import functools
import io
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

import click

from ..admin import LockInfo, Locks
from ..admin.look import once_each
from ..admin.names import plain, typed
from ..engine.protocol import MARKER
from ..errors import LockConfigError, LockUnavailable, RelockError

# Exit codes: found; not found; the command, its options or the settings are wrong; Redis cannot be
# reached (EX_UNAVAILABLE, as in Celery's own commands); what is told cannot be written (EX_IOERR).
FOUND, NOT_FOUND, WRONG_USE, UNAVAILABLE, UNWRITTEN = 0, 1, 2, 69, 74

#: Lua writes larger numbers otherwise, and Redis refuses them.
MOST = 1_000_000
#: For options that count.
AT_LEAST_0 = click.IntRange(0, MOST)


class _Seconds(click.FloatRange):
    """Click takes `nan` for a number within any range."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not in the range {self.min} to {self.max}.", param, ctx)
        return number


#: For options that take seconds, a day at most.
SECONDS = _Seconds(0, 86_400)


def given(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """Refuse an empty text, for what names a lock, a task or a Redis: an unset variable of a shell
    is not an option that was left out."""
    for each in value if isinstance(value, tuple) else (value,):
        if each is not None and not each.strip():
            raise click.BadParameter("it is empty.", ctx, param)
    return value


# The name of the app that Celery creates if `-A` names none.
_NO_APP = "default"
# Of tables, in characters: the width of a terminal that does not report it, the gap between two
# columns, and the least width of a column.
_WIDTH, _GAP, _LEAST = 80, 2, 6


class Here:
    """Which locks a command is about, and how it prints.

    Attributes:
        app: the Celery app of `celery -A`; None with `--redis`.
        json: whether to print one JSON document instead of text.
        redis: the value of `--redis`, or None.
        namespace: the value of `--namespace`, which can be empty by mistake; else the app's, or
            "relock".
    """

    def __init__(self, app: Any, redis: str | None, namespace: str | None, as_json: bool) -> None:
        if redis is None and namespace is not None:
            raise click.UsageError("--namespace needs --redis; an app has its own namespace")
        self.app = None if redis else app
        self.json = as_json
        self.redis = redis
        if namespace is None:
            namespace = "relock"
            if redis and app is not None:  # an app beside the Redis tells its own, if it has locks
                with suppress(RelockError):
                    namespace = Locks(app).namespace
        self.namespace = namespace

    @functools.cached_property
    def locks(self) -> Locks:
        """The locks of the app, or of `--redis` and `--namespace`.

        Raises:
            LockConfigError: the settings do not lead to a Redis.
            UsageError: there is neither an app nor `--redis`.
        """
        if self.redis:
            return Locks(self.redis, namespace=self.namespace)
        try:
            return Locks(self.app)
        except LockConfigError:
            if getattr(self.app, "main", None) != _NO_APP:
                raise
            raise click.UsageError(
                "say where the locks are: celery -A APP relock …, or --redis URL"
            ) from None

    def find(self, pattern: str, *, markers: bool = False) -> Iterator[LockInfo]:
        """The locks like a pattern that somebody typed; with `markers`, the dedup markers."""
        meant = typed(pattern, is_pattern=True)
        # `ls --dedup` shows names with this prefix, which `Locks.find` adds.
        patterns = dict.fromkeys((pattern, meant.removeprefix(MARKER) if markers else meant))
        return once_each(self.locks.find(each, markers=markers) for each in patterns)

    def meant(self, name: str) -> str:
        """The lock that somebody typed. A lock that has the very name comes before another one
        that `shown` shows so."""
        meant = typed(name)
        return meant if meant == name or self.locks.get(name, 0).idle else name

    def show(self, document: Any, lines: Iterable[str]) -> None:
        """Print a JSON document, or lines of text."""
        if self.json:
            echo_json(document, indent=2)
            return
        for line in lines:
            click.echo(line)


def echo_json(document: Any, indent: int | None = None) -> None:
    """Print a JSON document, with escapes of JSON where stdout may not encode all characters."""
    is_utf = (sys.stdout.encoding or "").lower().startswith("utf")
    click.echo(json.dumps(document, ensure_ascii=not is_utf, indent=indent))


def command(function: Callable[..., int]) -> click.Command:
    """Make a command of `celery relock`, with `--json`, `--redis` and `--namespace`.

    Args:
        function: gets a `Here` and the command's own parameters, and returns the exit code. Its
            docstring is the help.
    """

    @click.pass_context
    def run(
        ctx: click.Context,
        /,
        as_json: bool,
        redis: str | None,
        namespace: str | None,
        **parameters: Any,
    ) -> None:
        # Closed by the caller.
        sys.stdin, sys.stdout = sys.stdin or _nowhere("r"), sys.stdout or _nowhere("w")
        if isinstance(sys.stdout, io.TextIOWrapper):  # what it cannot encode is written out
            sys.stdout.reconfigure(errors="backslashreplace")
        _check_text((redis, namespace, *parameters.values()))
        here = Here(getattr(ctx.obj, "app", None), redis, namespace, as_json)
        ctx.exit(_code_of(lambda: function(here, **parameters)))

    made = click.command(function.__name__)(functools.update_wrapper(run, function))
    made.params += [
        click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document."),
        click.Option(
            ["--redis"],
            callback=given,
            metavar="URL",
            help="The Redis of the locks, instead of an app.",
        ),
        click.Option(
            ["--namespace"], help="With --redis: the namespace. Default: the app's, or relock."
        ),
    ]
    for each in made.params:
        if isinstance(each, click.Option):
            # Celery gives each option a variable, CELERY_RELOCK_…, as Kubernetes does each Service.
            each.allow_from_autoenv = False
    return made


def _code_of(call: Callable[[], int]) -> int:
    """The exit code of a command. What it raises is printed."""
    try:
        return call()
    except RelockError as error:
        click.echo(f"Error: {error}", err=True)
        return UNAVAILABLE if isinstance(error, LockUnavailable) else WRONG_USE
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # click ends quietly
        click.echo(f"Error: {error}", err=True)
        sys.stdout = _nowhere("w")  # else Python tries again when it ends
        return UNWRITTEN


def _nowhere(mode: str) -> TextIO:
    return cast(TextIO, Path(os.devnull).open(mode))  # until the process ends


def _check_text(values: Iterable[Any]) -> None:
    """Refuse bytes that are not UTF-8: Python passes them on as surrogates, which Redis cannot be
    sent."""
    for value in values:
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, str) and not each.isascii():
                try:
                    each.encode()
                except UnicodeEncodeError:
                    raise click.UsageError(f"'{plain(each)}' is not UTF-8") from None


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], firm: Sequence[str] = ()
) -> list[str]:
    """Lines with aligned columns. On a terminal, lines fit its width: the widest columns lose the
    middle of long texts, unless they are `firm`. In a pipe nothing is cut."""
    texts = [list(head), *([plain(str(cell)) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*texts, strict=True)]
    if sys.stdout.isatty():
        room = shutil.get_terminal_size((_WIDTH, 24)).columns - _GAP * (len(widths) - 1)
        soft = [index for index, name in enumerate(head) if name not in firm]
        while sum(widths) > room:
            widest = max(soft, key=lambda index: widths[index])
            if widths[widest] <= _LEAST:
                break
            widths[widest] -= 1
    return [(" " * _GAP).join(map(_fitted, row, widths)).rstrip() for row in texts]


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def _fitted(text: str, width: int) -> str:
    fitted, kept = text, width
    while _width(fitted) > width:
        kept -= 1
        head = kept // 2
        fitted = f"{text[:head]}…{text[len(text) - (kept - head) :]}"
    return fitted + " " * (width - _width(fitted))
