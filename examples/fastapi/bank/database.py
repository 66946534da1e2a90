"""The tables (`python -m bank.database` makes them), an engine for tasks, one for coroutines."""

import os

from sqlalchemy import BigInteger, ForeignKey, String, create_engine, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

URL = os.environ.get("DATABASE_URL") or f"sqlite:///{os.environ.get('DATABASE', 'bank.sqlite3')}"
engine = create_engine(URL)
async_engine = create_async_engine(URL.replace("sqlite:", "sqlite+aiosqlite:"))


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]  # in cents
    closed: Mapped[bool] = mapped_column(default=False)


class Entry(Base):
    """A payment, or a deposit with its line of a statement as id."""

    __tablename__ = "entry"
    id: Mapped[str] = mapped_column(String(40), primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey("account.id"))
    cents: Mapped[int]
    state: Mapped[str] = mapped_column(String(10), default="new")


class Fence(Base):
    """The highest fencing token of each lock name: what `lock.fenced` reads and writes."""

    __tablename__ = "relock_fence"
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    token: Mapped[int] = mapped_column(BigInteger)


if __name__ == "__main__":
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        for number in {7, 42} - set(session.scalars(select(Account.id))):
            session.add(Account(id=number, balance=10_000))
