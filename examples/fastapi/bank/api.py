"""The HTTP interface. It never waits for a lock in a thread, and never blocks the event loop."""

import asyncio
from typing import Annotated
from uuid import uuid4

from sqlalchemy.ext.asyncio import AsyncSession

from fastapi import Body, FastAPI, HTTPException

from .database import Account, Entry, async_engine
from .tasks import import_statement, pay

api = FastAPI()


@api.post("/accounts/{account_id}/payments", status_code=202)
async def create_payment(account_id: int, cents: Annotated[int, Body(embed=True, gt=0)]) -> dict:
    payment_id = str(uuid4())
    async with AsyncSession(async_engine) as session, session.begin():
        if await session.get(Account, account_id) is None:
            raise HTTPException(404)
        session.add(Entry(id=payment_id, account_id=account_id, cents=cents))
    # After the commit: a worker that is quick would look for a payment that is not there yet.
    # In a thread: to send is to talk to the broker.
    await asyncio.to_thread(pay.delay, account_id, payment_id)
    return {"payment": payment_id}


@api.get("/payments/{payment_id}")
async def show_payment(payment_id: str) -> dict:
    async with AsyncSession(async_engine) as session:
        if (payment := await session.get(Entry, payment_id)) is None:
            raise HTTPException(404)
        return {"state": payment.state}


@api.get("/accounts/{account_id}")
async def show_account(account_id: int) -> dict:
    async with AsyncSession(async_engine) as session:
        if (account := await session.get(Account, account_id)) is None:
            raise HTTPException(404)
        return {"balance": account.balance, "closed": account.closed}


@api.post("/accounts/{account_id}/close")
async def close_account(account_id: int) -> dict:
    """Close an account between two payments, never during one."""
    lock = pay.async_lock_for(account_id, payment_id="")
    if not await lock.acquire(blocking_timeout=2):  # a browser is waiting
        raise HTTPException(409, "a payment is being sent, try again")
    try:
        async with AsyncSession(async_engine) as session, session.begin(), lock.fenced(session):
            account = await session.get_one(Account, account_id)
            account.closed = True
            return {"balance": account.balance}
    finally:
        await lock.release()


@api.post("/imports/{bank}", status_code=202)
async def start_import(bank: str) -> dict:
    return {"task": (await asyncio.to_thread(import_statement.delay, bank)).id}
