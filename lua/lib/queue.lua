-- lib/queue: the waiters of a lock in the order of their tickets, and who enters next.

local Queue = {}

-- A call never works through more dead or unreachable waiters than this, so that no call stalls the
-- server; the next heartbeat goes on from there.
Queue.MOST = 256

function Queue.waiter(lock, run)
  local record = redis.call('HGET', lock.waiters, run)
  return record and cjson.decode(record)
end

local function others(call, lock, waiter)
  local locks = {}
  for _, name in ipairs(waiter.names or { lock.name }) do
    local key = call.prefix .. 'l:' .. name
    locks[#locks + 1] = key == lock.key and lock or Holds.open(call, key)
  end
  return locks
end

function Queue.leave(call, lock, run, waiter)
  for _, each in ipairs(waiter and others(call, lock, waiter) or { lock }) do
    redis.call('ZREM', each.queue, run)
    redis.call('HDEL', each.waiters, run)
  end
end

function Queue.write(lock, run, waiter)
  redis.call('HSET', lock.waiters, run, cjson.encode(waiter))
  -- A queue outlives its last heartbeat by a moment and no more, should every waiter die at once.
  local expiry = string.format('%.0f', waiter.expiry + Holds.GRACE)
  redis.call('PEXPIREAT', lock.waiters, expiry)
  redis.call('PEXPIREAT', lock.queue, expiry)
end

-- One ticket for all the locks that a run wants: with one order over all queues the oldest run is
-- first in each of its own, so runs that want A,B and B,A cannot wait for each other.
function Queue.enter(call, locks, run, waiter)
  local ticket = call.micros
  for _, lock in ipairs(locks) do
    local last = redis.call('ZREVRANGE', lock.queue, 0, 0, 'WITHSCORES')
    ticket = math.max(ticket, tonumber(last[2] or 0) + 1)
  end
  for _, lock in ipairs(locks) do
    -- NX: whoever comes back, by a repeated command or as a new attempt of a dead one, keeps its place.
    redis.call('ZADD', lock.queue, 'NX', string.format('%.0f', ticket), run)
    Queue.write(lock, run, waiter)
  end
end

local function admissible(call, lock, run, waiter)
  for i, each in ipairs(others(call, lock, waiter)) do
    if each.entries >= waiter.limits[i] then
      return false
    end
    if each ~= lock and redis.call('ZRANK', each.queue, run) ~= 0 then
      return false
    end
  end
  return true
end

-- No receiver: the process is gone, or for now not connected. pcall: a server that forbids the
-- channel answers with an error; then the heartbeat finds the grant.
local function reached(call, run, waiter, fence)
  local message = table.concat({ 'granted', run, waiter.nonce, fence }, ' ')
  return redis.pcall('PUBLISH', call.prefix .. 'i:' .. waiter.inbox, message) ~= 0
end

-- The hold's first lease is what is left of the waiter's: a waiter that has died meanwhile, and all
-- the dead behind it, hold up the others for one waiter's lease in total.
local function grant(call, lock, run, waiter, fence)
  local locks = others(call, lock, waiter)
  Queue.leave(call, lock, run, waiter)
  for _, each in ipairs(locks) do
    local hold = { expiry = waiter.expiry, fence = fence, nonce = waiter.nonce, owner = waiter.owner }
    Holds.write(each, run, hold, waiter.inbox .. ' ' .. waiter.who)
  end
end

-- Queued runs of an owner that is in now, if they may enter by owner: they join its entry.
function Queue.join(call, lock, owner, fence, caller)
  for _, run in ipairs(redis.call('ZRANGE', lock.queue, 0, Queue.MOST - 1)) do
    local waiter = Queue.waiter(lock, run)
    local joins = waiter and waiter.by_owner and waiter.owner == owner and not waiter.names
    if joins and waiter.expiry > call.now and (run == caller or reached(call, run, waiter, fence)) then
      grant(call, lock, run, waiter, fence)
    end
  end
end

-- Let the head in while it may enter. True: somebody who can be reached still waits, so a newcomer
-- has to queue. `caller` is the run that asks now: it needs no message, the reply tells it.
function Queue.promote(call, lock, caller)
  local skipped = 0
  for _ = 1, Queue.MOST do
    local run = redis.call('ZRANGE', lock.queue, skipped, skipped)[1]
    if not run then
      return false
    end
    local waiter = Queue.waiter(lock, run)
    if not waiter or waiter.expiry <= call.now then
      Queue.leave(call, lock, run, waiter)
    elseif not admissible(call, lock, run, waiter) then
      return true
    else
      local fence = Call.next_fence(call)
      if run == caller or reached(call, run, waiter, fence) then
        Call.spend_fence(call, fence)
        grant(call, lock, run, waiter, fence)
        if waiter.by_owner then
          Queue.join(call, lock, waiter.owner, fence, caller)
        end
      else
        skipped = skipped + 1
      end
    end
  end
  return true
end
