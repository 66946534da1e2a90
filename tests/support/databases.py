"""Private database servers on free ports of 127.0.0.1: PostgreSQL and MariaDB."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from tests.support.ports import free_port
from tests.support.servers import Server


def find_postgres() -> Path | None:
    """The folder of the newest PostgreSQL server's programs, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=_version)
    on_path = shutil.which("postgres")
    return found[-1].parent if found else Path(on_path).resolve().parent if on_path else None


def find_mariadb() -> str | None:
    """Path of a MariaDB server, or None."""
    return shutil.which("mariadbd") or shutil.which("mariadbd", path="/usr/sbin:/usr/libexec")


class Database(Server):
    """A running server with data of its own, without fsync: nothing in it outlives the tests.

    Attributes:
        port: on 127.0.0.1.
    """

    #: What `connect` raises while it does not answer.
    _away: type[Exception]

    def __init__(self) -> None:
        super().__init__("db")
        self.port = free_port()
        # Neither server runs as root; a user that always is there.
        self._as = {"user": "nobody"} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self._folder, "nobody")

    def connect(self) -> Any:
        raise NotImplementedError

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, check=False, **self._as
        )
        if done.returncode:
            self.stop()
            raise RuntimeError(f"{command[0]}:\n{done.stdout}{done.stderr}")

    def _serve(self, *command: str) -> None:
        if not self._launch([*command], 60, cwd=self._folder, **self._as):
            text = self.log()
            self.stop()
            raise RuntimeError(f"{command[0]} did not start:\n{text}")

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except self._away:
            return False
        return True


class Postgres(Database):
    """PostgreSQL. `url` is for libpq and psycopg."""

    _away = psycopg.OperationalError

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
        self._serve(program, "-D", data, "-p", str(self.port), *set_so)

    def fresh(self, name: str) -> str:
        """The URL of a new database."""
        with self.connect(autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return f"{self.url.rpartition('/')[0]}/{name}"

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.url, connect_timeout=5, **options)


class MariaDB(Database):
    _away = pymysql.err.OperationalError

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
        )  # fmt: skip
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE shop")

    def connect(self, **options: Any) -> pymysql.Connection[Any]:
        return pymysql.connect(
            host="127.0.0.1", port=self.port, user="root", charset="utf8mb4", connect_timeout=5,
            **options,
        )  # fmt: skip


def _version(path: Path) -> float:
    text = path.parts[-3]
    return float(text) if text.replace(".", "").isdecimal() else 0.0
