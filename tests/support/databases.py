"""Private database servers on free ports of 127.0.0.1: PostgreSQL and MariaDB."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from tests.support import reaper
from tests.support.ports import free_port
from tests.support.waiting import wait_for


def find_postgres() -> Path | None:
    """The folder of the newest PostgreSQL server's programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version)
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


def find_mariadb() -> str | None:
    """Path of a MariaDB server, or None."""
    return shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin:/usr/libexec")


class Server:
    """A running server with data of its own, without fsync: nothing in it outlives the tests.

    Attributes:
        port: on 127.0.0.1.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self._folder = Path(tempfile.mkdtemp(prefix="relock-db-"))
        # Neither server runs as root; a user that always is there.
        self._as = {"user": "nobody"} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self._folder, "nobody")
        self._process: subprocess.Popen[Any] | None = None

    def connect(self) -> Any:
        raise NotImplementedError

    def stop(self) -> None:
        """End the server for good and remove its files; may be repeated."""
        if self._process is not None:
            reaper.end(self._process)
            self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, check=False, **self._as
        )
        if done.returncode:
            self.stop()
            raise RuntimeError(f"{command[0]}:\n{done.stdout}{done.stderr}")

    def _serve(self, *command: str, errors: type[Exception]) -> None:
        log = (self._folder / "log").open("a")
        with log:
            self._process = process = reaper.start(
                [*command], cwd=self._folder, stdout=log, stderr=log, **self._as
            )
        wait_for(
            lambda: process.poll() is not None or _answers(self.connect, errors),
            60,
            f"{command[0]} to answer",
        )
        if process.poll() is not None:
            text = (self._folder / "log").read_text(errors="replace")
            self.stop()
            raise RuntimeError(f"{command[0]} did not start:\n{text}")


class Postgres(Server):
    """PostgreSQL. `url` is for libpq and psycopg."""

    def __init__(self) -> None:
        super().__init__()
        folder = find_postgres()
        if folder is None:
            raise FileNotFoundError("no PostgreSQL server")
        self.url = f"postgresql://relock@127.0.0.1:{self.port}/postgres"
        data = str(self._folder / "data")
        self._run(str(folder / "initdb"), "-D", data, "-U", "relock", "-A", "trust", "--no-sync")
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "16MB",
        }
        set_so = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        program = str(folder / "postgres")
        self._serve(
            program, "-D", data, "-p", str(self.port), *set_so, errors=psycopg.OperationalError
        )

    def fresh(self, name: str) -> str:
        """The URL of a new database."""
        with self.connect(autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return f"{self.url.rpartition('/')[0]}/{name}"

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, connect_timeout=5, **options)


class MariaDB(Server):
    def __init__(self) -> None:
        super().__init__()
        program = find_mariadb()
        if program is None:
            raise FileNotFoundError("no MariaDB server")
        # No system tables, and so no users either: everybody may do everything.
        self._run("mkdir", "data")
        self._serve(
            program, "--no-defaults", "--skip-grant-tables", f"--datadir={self._folder / 'data'}",
            f"--socket={self._folder / 'socket'}", f"--port={self.port}",
            f"--tmpdir={self._folder}", "--bind-address=127.0.0.1",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-buffer-pool-size=16M",
            errors=pymysql.err.OperationalError,
        )  # fmt: skip
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE shop")

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", charset="utf8mb4", connect_timeout=5,
            **options,
        )  # fmt: skip


def _answers(connect: Callable[[], Any], errors: type[Exception]) -> bool:
    try:
        connect().close()
    except errors:
        return False
    return True


def _version(path: Path) -> float:
    text = path.parts[-3]
    return float(text) if text.replace(".", "").isdecimal() else 0.0
