-- inspect: Return who holds a lock and how many wait for it, and change nothing.
-- KEYS[1] lock: hash, the holds of the lock
-- KEYS[2] queue: sorted set, the executions that wait
-- Reply {holds, waiting}: holds as lists of facts, and how many places the queue has
-- Keeps: reads only; lapsed holds are left out
-- Uses: lib/base, lib/facts

local lock, queue = KEYS[1], KEYS[2]
local now = math.floor(Base.micros() / 1000)
return { Facts.every(lock, now), redis.call('ZCARD', queue) }
