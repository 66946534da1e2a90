"""Fenced writes: the database refuses the write of a task that has lost its lock.

    with connection.transaction(), self.lock.fenced(connection):
        ...  # read, compute, write

A holder that was paused for longer than its lease goes on when somebody else holds the lock, and no
lock can stop that. The database can. A table keeps the highest fencing token that it has seen for
each lock name; a lower token raises `LockLost`, and the transaction rolls back. The row stays
locked until the transaction ends, so a higher token waits for a transaction that has been let
through, and then reads what that transaction wrote.

The table must be in the database of the data. `create_table` returns the statement that creates it;
the Django app `celery_relock.contrib.django` has a migration.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

from ..engine import ids
from ..errors import LockConfigError, LockLost

__all__ = ["create_table", "fence", "fenced"]

TABLE = "relock_fence"
# The width of the column, in characters; and how much of a name stands before its digest.
_LONGEST, _CUT = 255, 200

# One row changes if the token is accepted, and none otherwise.
_ON_CONFLICT = (
    f"INSERT INTO {TABLE} (name, token) VALUES (%s, %s) ON CONFLICT (name) "
    f"DO UPDATE SET token = excluded.token WHERE {TABLE}.token <= excluded.token"
)
# In MySQL the number of rows depends on the client's flags, and does not distinguish an equal token
# from a lower one. So the statement returns the highest token, as the last id.
_ON_DUPLICATE_KEY = (
    f"INSERT INTO {TABLE} (name, token) VALUES (%s, LAST_INSERT_ID(%s)) "
    "ON DUPLICATE KEY UPDATE token = LAST_INSERT_ID(GREATEST(token, %s))"
)
DIALECTS = {
    "postgresql": _ON_CONFLICT,
    "sqlite": _ON_CONFLICT,
    "mysql": _ON_DUPLICATE_KEY,
    "mariadb": _ON_DUPLICATE_KEY,
}
# By the package of the connection's class: the database, and its placeholder for parameters.
_DRIVERS = {
    "psycopg": ("postgresql", "%s"),  # with a RawCursor: $1 and $2
    "psycopg2": ("postgresql", "%s"),
    "sqlite3": ("sqlite", "?"),
    "pymysql": ("mysql", "%s"),
    "MySQLdb": ("mysql", "%s"),
}
_WANTED = (
    "a connection of Django, of SQLAlchemy (or its Session), of psycopg, psycopg2, PyMySQL, "
    "mysqlclient or sqlite3"
)


def create_table(dialect: str = "postgresql") -> str:
    """The SQL statement that creates the table.

    Args:
        dialect: "postgresql", "sqlite", "mysql" or "mariadb".

    Raises:
        LockConfigError: the dialect is none of these.
    """
    exactly, engine = "", ""
    if _statement(dialect) is _ON_DUPLICATE_KEY:
        # MySQL compares text without regard to case unless it is told otherwise; and the default
        # engine of a server can be one without transactions, which locks no row.
        exactly, engine = " CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", " ENGINE=InnoDB"
    name = f"name varchar({_LONGEST}){exactly}"
    return f"CREATE TABLE {TABLE} ({name} PRIMARY KEY, token bigint NOT NULL){engine}"


def fence(connection: Any, name: str, token: int) -> None:
    """Let the transaction go on only if the database has not seen a higher token of the lock.

    Call it first in the transaction, before you read the rows that you will change. Until the
    transaction ends, a transaction with another token of the lock waits.

    Args:
        connection: a connection in a transaction: of Django, of SQLAlchemy (or a Session), or of a
            DB-API driver for PostgreSQL, MySQL, MariaDB or SQLite.
        name: the lock name.
        token: the fencing token, `lock.fence`.

    Raises:
        LockLost: the database has seen a higher token, or the token is 0 because the lock is not
            held. Let the transaction roll back.
        LockConfigError: the connection is of another kind, or not in a transaction; or it is a
            Session for several databases; or the name is not text, or the token not a number.
    """
    given: tuple[object, object] = name, token
    if not (isinstance(given[0], str) and isinstance(given[1], int)):
        raise LockConfigError(
            "a fence needs a lock name, which is text, and a fencing token, which is a number "
            f"(lock.name and lock.fence), not {name!r:.200} and {token!r:.80}"
        )
    if token <= 0:
        raise LockLost(
            f"the lock {name!r} has no fencing token: it is not held, or the work goes on without "
            "it (relock_enabled=False, lock_on_unavailable='run')",
            name=name,
        )
    try:
        is_highest = _see(connection, _stored(name), token)
    except Exception as error:
        if TABLE in str(error) and hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(
                f"If there is no table {TABLE}: in Django add 'celery_relock.contrib.django' to "
                "INSTALLED_APPS and run `manage.py migrate`; elsewhere execute the statement that "
                "celery_relock.contrib.sql.create_table(dialect) returns, once"
            )
        raise
    if not is_highest:
        raise LockLost(
            f"the lock {name!r} (fence {token}) was lost: the database has seen a higher fencing "
            "token, so another task has had the lock since. Let the transaction roll back",
            name=name,
            remaining=0.0,
        )
    if not _in_transaction(_driver_of(connection)):
        raise LockConfigError(
            f"the fence of {name!r} needs a transaction, and the connection is in autocommit mode: "
            "begin a transaction before the fence, and commit it after the writes",
            name=name,
        )


@contextmanager
def fenced(
    connection: Any, tokens: Mapping[str, int], limit: int, check: Callable[[], None]
) -> Iterator[None]:
    """The block of `lock.fenced(connection)`: calls `fence` for each lock name at the beginning and
    at the end of the block, in one transaction.

    Args:
        connection: as for `fence`.
        tokens: the fencing token of each lock name.
        limit: the highest number of permits of these locks.
        check: raises LockLost if this process knows already that a lock is lost.

    Raises:
        LockLost: as `fence`.
        LockConfigError: as `fence`; or a lock has several permits; or the transaction ended inside
            the block and no other has begun. If another has begun, it is checked at the end of the
            block.
    """
    _check_limit(tokens, limit)
    _begin(connection, tokens, check)
    yield
    _end(connection, tokens, check)


@asynccontextmanager
async def fenced_async(
    connection: Any, tokens: Mapping[str, int], limit: int, check: Callable[[], None]
) -> AsyncIterator[None]:
    """As `fenced`, for a lock of `celery_relock.asyncio`."""
    _check_limit(tokens, limit)
    if not hasattr(connection, "run_sync"):
        raise _refused(connection, ", but AsyncConnection or AsyncSession, both of SQLAlchemy")
    await connection.run_sync(_begin, tokens, check)
    yield
    await connection.run_sync(_end, tokens, check)


def _check_limit(tokens: Mapping[str, int], limit: int) -> None:
    if limit > 1:
        raise LockConfigError(
            f"{', '.join(tokens)}: a lock with {limit} permits has several holders at a time, "
            "whose tokens are all valid: only a lock with one permit can be fenced"
        )


def _begin(connection: Any, tokens: Mapping[str, int], check: Callable[[], None]) -> None:
    check()
    for name in sorted(tokens):  # always in one order, so that two transactions cannot deadlock
        fence(connection, name, tokens[name])


def _end(connection: Any, tokens: Mapping[str, int], check: Callable[[], None]) -> None:
    if getattr(connection, "needs_rollback", False):
        return  # Django rolls all back that the block has written, and refuses statements till then
    if _has_ended(connection) or not _in_transaction(_driver_of(connection)):
        raise LockConfigError(
            f"the transaction ended inside the fenced block of {', '.join(sorted(tokens))}: commit "
            "or roll back after the block, not in it"
        )
    _begin(connection, tokens, check)


def _see(connection: Any, row: str, token: int) -> bool:
    """Show the database a token. Returns whether the token is the highest."""
    if hasattr(connection, "run_sync"):
        raise _refused(connection, ": await connection.run_sync(fence, name, token)")
    connection = _connection_of(connection)
    if hasattr(connection, "exec_driver_sql"):
        from sqlalchemy import text

        statement = _statement(connection.dialect.name)
        marks = (":name", ":token", ":token")[: statement.count("%s")]
        result = connection.execute(text(statement % marks), {"name": row, "token": token})
        return _is_highest(result, statement, token)
    dialect, mark = (connection.vendor, "%s") if _is_django(connection) else _driver(connection)
    statement = _statement(dialect)
    parameters = (row, token, token)[: statement.count("%s")]
    with closing(connection.cursor()) as cursor:
        if dialect == "postgresql":
            return _is_highest_in_postgres(cursor, statement, parameters)
        cursor.execute(statement.replace("%s", mark), parameters)
        return _is_highest(cursor, statement, token)


def _is_highest_in_postgres(cursor: Any, statement: str, parameters: tuple[Any, ...]) -> bool:
    if any(kind.__name__ == "RawCursor" for kind in cursor.__class__.__mro__):  # of psycopg
        statement = statement.replace("%s", "$1", 1).replace("%s", "$2", 1)
    cursor.execute(f"{statement} RETURNING 1", parameters)
    if cursor.rowcount >= 0:
        return bool(cursor.rowcount == 1)
    # In a pipeline of psycopg, only who asks for a row waits for the answer.
    cursor.row_factory = lambda _: tuple
    return cursor.fetchone() is not None


def _is_highest(cursor: Any, statement: str, token: int) -> bool:
    if statement is _ON_DUPLICATE_KEY:
        return bool(cursor.lastrowid == token)
    if cursor.rowcount < 0:
        raise LockConfigError(
            "a fence needs to know how many rows its statement changed, and the driver does not "
            "tell: inside a pipeline of psycopg, give the fence the connection of psycopg"
        )
    return bool(cursor.rowcount == 1)


def _connection_of(connection: Any) -> Any:
    """The connection, or that of SQLAlchemy's Session."""
    if not (hasattr(connection, "get_bind") and hasattr(connection, "connection")):
        return connection
    from sqlalchemy.exc import UnboundExecutionError

    try:
        return connection.connection()
    except UnboundExecutionError as error:
        raise LockConfigError(
            "a fence needs the connection of the database that has the data, and this Session has "
            "several databases and no default: give the fence "
            'session.connection(bind_arguments={"mapper": Model})'
        ) from error


def _is_django(connection: Any) -> bool:
    return hasattr(connection, "vendor") and hasattr(connection, "in_atomic_block")


def _driver_of(connection: Any) -> Any:
    """The connection of the database's driver."""
    connection = _connection_of(connection)
    if hasattr(connection, "exec_driver_sql"):
        return connection.connection.driver_connection
    return connection.connection if _is_django(connection) else connection


def _driver(connection: Any) -> tuple[str, str]:
    if hasattr(connection, "fetchone"):
        raise _refused(connection, ", a cursor: give its connection")
    # `__class__`, not `type`: a tracer's proxy returns the class of the connection that it wraps.
    kind = connection.__class__
    waits = inspect.iscoroutinefunction(getattr(kind, "commit", None))
    for package in (each.__module__.partition(".")[0] for each in kind.__mro__):
        if package in _DRIVERS and not waits:
            return _DRIVERS[package]
    raise _refused(connection)


def _refused(connection: Any, hint: str = "") -> LockConfigError:
    kind = connection.__class__
    return LockConfigError(
        f"a fence needs {_WANTED}, not {kind.__module__}.{kind.__qualname__}{hint}"
    )


def _has_ended(connection: Any) -> bool:
    """Whether SQLAlchemy knows that the transaction has ended. Not each driver knows it."""
    # A scoped_session has not what is asked for below; its Session has.
    connection = connection.registry() if hasattr(connection, "registry") else connection
    return hasattr(connection, "get_transaction") and connection.get_transaction() is None


def _in_transaction(driver: Any) -> bool:
    """Whether the connection is in a transaction."""
    if hasattr(driver, "in_transaction"):  # sqlite3
        return bool(driver.in_transaction)
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return bool(driver.is_in_transaction())
    if hasattr(driver, "info") and hasattr(driver.info, "transaction_status"):  # psycopg, psycopg2
        return bool(driver.info.transaction_status)
    if hasattr(driver, "server_status"):  # PyMySQL: the flag SERVER_STATUS_IN_TRANS
        return bool(driver.server_status & 1)
    # These two see neither an explicit BEGIN nor that a transaction has ended.
    if hasattr(driver, "get_autocommit"):  # mysqlclient
        return not driver.get_autocommit()
    if isinstance(getattr(driver, "autocommit", None), bool):  # pg8000
        return not driver.autocommit
    raise _refused(driver, ", which does not tell whether it is in a transaction")


def _statement(dialect: str) -> str:
    if dialect in DIALECTS:
        return DIALECTS[dialect]
    raise LockConfigError(f"a fence needs {', '.join(DIALECTS)}, not {dialect!r}")


def _stored(name: str) -> str:
    # MySQL takes two names that differ only in spaces at their end for one.
    if len(name) <= _LONGEST and not name.endswith(" "):
        return name
    return f"{name[:_CUT]}~{ids.digest(name.encode())}"
