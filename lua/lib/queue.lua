-- lib/queue: the waiters of a lock in the order of their tickets, and who enters next.

local Queue = {}

-- A call never works through more dead or unreachable waiters than this, so that no call stalls the
-- server; the next heartbeat goes on from there.
Queue.MOST = 256

function Queue.waiter(lock, run)
  local record = redis.call('HGET', lock.waiters, run)
  return record and cjson.decode(record)
end

-- All the locks that a waiter of this one wants.
function Queue.wanted(call, lock, waiter)
  local locks = {}
  for i, name in ipairs(waiter.names or { lock.name }) do
    local key = call.prefix .. 'l:' .. name
    locks[i] = key == lock.key and lock or Holds.open(call, key)
  end
  return locks
end

function Queue.leave(call, lock, run, waiter)
  for _, each in ipairs(waiter and Queue.wanted(call, lock, waiter) or { lock }) do
    redis.call('ZREM', each.queue, run)
    redis.call('HDEL', each.waiters, run)
  end
end

function Queue.write(call, lock, run, waiter)
  redis.call('HSET', lock.waiters, run, cjson.encode(waiter))
  -- A queue outlives its last heartbeat by a moment and no more, should every waiter die at once.
  -- Only ever longer: another waiter may have a longer life than this one.
  local life = waiter.expiry - call.now
  if redis.call('PTTL', lock.queue) < life + 1000 then
    redis.call('PEXPIRE', lock.waiters, life + Holds.GRACE)
    redis.call('PEXPIRE', lock.queue, life + Holds.GRACE)
  end
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
    Queue.write(call, lock, run, waiter)
  end
end

-- What a waiter may have now: for each of its locks the fence of the entry that it joins, or false
-- for an entry of its own; nil while a lock is not to be had. Where it does not join it has to be
-- first in the queue; `head` is the lock where the caller has seen to that.
local function admission(call, lock, run, waiter, head)
  local fences = {}
  for i, each in ipairs(Queue.wanted(call, lock, waiter)) do
    fences[i] = waiter.by_owner and Holds.entry_of(each.holds, waiter.owner) or false
    if not fences[i] then
      if each.entries >= waiter.limits[i] then
        return nil
      end
      if each ~= head and redis.call('ZRANK', each.queue, run) ~= 0 then
        return nil
      end
    end
  end
  return fences
end

-- No receiver: the process is gone, or for now not connected. pcall: a server that forbids the
-- channel answers with an error; then the heartbeat finds the grant.
local function reached(call, run, waiter, fences)
  local message = table.concat({ 'granted', run, waiter.nonce, unpack(fences) }, ' ')
  return redis.pcall('PUBLISH', call.prefix .. 'i:' .. waiter.inbox, message) ~= 0
end

-- The hold's first lease is what is left of the waiter's: a waiter that has died meanwhile, and all
-- the dead behind it, hold up the others for one waiter's lease in total. False: it could not be
-- told and keeps its place. The run that asks now needs no message, the reply tells it.
local function let_in(call, lock, run, waiter, fences, caller)
  local fence
  for i, joined in ipairs(fences) do
    fence = fence or not joined and Call.next_fence(call)
    fences[i] = joined or fence
  end
  if run ~= caller and not reached(call, run, waiter, fences) then
    return false
  end
  Queue.leave(call, lock, run, waiter)
  for i, each in ipairs(Queue.wanted(call, lock, waiter)) do
    local hold = { expiry = waiter.expiry, fence = fences[i], nonce = waiter.nonce, owner = waiter.owner }
    Holds.write(each, run, hold, waiter.inbox .. ' ' .. waiter.who)
  end
  return true
end

-- Queued runs of an owner that is in now, if they may enter by owner: they join its entry.
function Queue.join(call, lock, owner, caller)
  for _, run in ipairs(redis.call('ZRANGE', lock.queue, 0, Queue.MOST - 1)) do
    local waiter = Queue.waiter(lock, run)
    if waiter and waiter.by_owner and waiter.owner == owner and waiter.expiry > call.now then
      local fences = admission(call, lock, run, waiter)
      if fences then
        let_in(call, lock, run, waiter, fences, caller)
      end
    end
  end
end

-- A waiter that asks whether its owner is in by now. Only those that can be reached are let in with
-- their owner at once, and only with one that also enters by owner.
function Queue.rejoin(call, lock, run, waiter)
  local fences = waiter.by_owner and admission(call, lock, run, waiter)
  if fences then
    let_in(call, lock, run, waiter, fences, run)
  end
end

-- Let the head in while it may enter. True: somebody who is to enter before the caller still waits,
-- so the caller has to queue, or to stay there. `caller` is the run that asks now.
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
    else
      local fences = admission(call, lock, run, waiter, lock)
      if not fences then
        return run ~= caller
      end
      if not let_in(call, lock, run, waiter, fences, caller) then
        skipped = skipped + 1
      elseif waiter.by_owner then
        for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
          Queue.join(call, each, waiter.owner, caller)
        end
      end
    end
  end
  return true
end
