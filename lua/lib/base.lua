-- lib/base: the server's time, the next fence, the record of a hold: what the shortest way needs as well.

local Base = {}

-- Longer, in ms, than any pause in which a key without live holds may stay behind.
Base.GRACE = 60000

function Base.micros()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- Strictly above every fence before it, also after the counter was lost (time has moved on) and after
-- the clock was set back (the counter is kept). '%.0f': tostring() would round to 14 digits.
-- Spent before anybody is told of it: a server that may not write (no memory, a replica) stops the
-- script here, while no message is out.
function Base.next_fence(meta, micros)
  local last = tonumber(redis.call('HGET', meta, 'fence') or 0)
  local fence = string.format('%.0f', math.max(last + 1, micros))
  redis.call('HSET', meta, 'fence', fence)
  return fence
end

-- At the end of a hold's record: no lease of it was longer than 2^n ms, n as a letter; `z` says nothing.
-- What would live longer than that from now was written before the clock was set back.
function Base.bound(lease)
  local _, exponent = math.frexp(lease)
  return string.char(97 + math.min(exponent, 25))
end

-- A queue outlives its last heartbeat by a moment and no more, should every waiter die at once.
-- Only ever longer: another waiter may have a longer life than this one.
function Base.outlive(queue, waiters, life)
  if redis.call('PTTL', queue) < life + 1000 then
    redis.call('PEXPIRE', waiters, life + Base.GRACE)
    redis.call('PEXPIRE', queue, life + Base.GRACE)
  end
end

function Base.longest(bound)
  return bound == 'z' and math.huge or 2 ^ (string.byte(bound) - 97)
end

function Base.record(hold, now)
  local bound = Base.bound(hold.expiry - now)
  return string.format('%.0f %s %s %s %s', hold.expiry, hold.fence, hold.nonce, hold.owner, bound)
end
