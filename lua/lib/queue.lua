-- lib/queue: the places of those who wait, in the order of their tickets.

local Queue = {}

-- A call never works through more places than this, so that no call stalls the server; the next
-- heartbeat, or look at parked runs, goes on from there.
Queue.MOST = 256

function Queue.waiter(lock, run)
  local record = redis.call('HGET', lock.waiters, run)
  local waiter = record and cjson.decode(record)
  -- The clock was set back, as for Base.bound.
  if waiter and not waiter.parked and waiter.expiry > lock.now + waiter.life then
    waiter.expiry = lock.now + waiter.life
    redis.call('HSET', lock.waiters, run, cjson.encode(waiter))
  end
  return waiter
end

-- A parked run has no process that could die: its place is its own until it comes back.
function Queue.gone(call, waiter)
  return not waiter or not waiter.parked and waiter.expiry <= call.now
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

-- The message of a parked run goes; its places in the queues stay.
function Queue.unpark(call, locks, run, waiter)
  if not waiter or not waiter.parked then
    return
  end
  for _, lock in ipairs(locks) do
    redis.call('HDEL', lock.messages, run)
    -- Whoever waits in a process has a heartbeat that makes this longer again.
    if redis.call('EXISTS', lock.messages) == 0 then
      redis.call('PEXPIRE', lock.queue, Base.GRACE)
      redis.call('PEXPIRE', lock.waiters, Base.GRACE)
      redis.call('ZREM', call.prefix .. 'due', 'l ' .. lock.name)
    end
  end
  local index = call.prefix .. 'parked'
  redis.call('HDEL', index, run)
  -- Another run of the task may be parked by now: a retry, while a copy of this one lies here still.
  if redis.call('HGET', index, '#' .. waiter.task) == run then
    redis.call('HDEL', index, '#' .. waiter.task)
  end
  redis.call('ZREM', call.prefix .. 'due', 'r ' .. run)
  redis.call('ZREM', call.prefix .. 'owed:' .. waiter.home, run)
end

function Queue.leave(call, lock, run, waiter)
  local wanted = waiter and Queue.wanted(call, lock, waiter) or { lock }
  for _, each in ipairs(wanted) do
    redis.call('ZREM', each.queue, run)
    redis.call('HDEL', each.waiters, run)
  end
  Deadlock.forget(call, run, waiter or {})
  Queue.unpark(call, wanted, run, waiter)
end

function Queue.write(call, lock, run, waiter)
  redis.call('HSET', lock.waiters, run, cjson.encode(waiter))
  if waiter.parked or redis.call('EXISTS', lock.messages) == 1 then
    redis.call('PERSIST', lock.waiters)
    redis.call('PERSIST', lock.queue)
    return
  end
  Base.outlive(lock.queue, lock.waiters, waiter.expiry - call.now)
end

local function ticket_behind_all(call, locks)
  local ticket = call.micros
  for _, lock in ipairs(locks) do
    local last = redis.call('ZREVRANGE', lock.queue, 0, 0, 'WITHSCORES')
    ticket = math.max(ticket, tonumber(last[2] or 0) + 1)
  end
  return ticket
end

local function ticket_before_all(call, locks)
  local ticket = call.micros
  for _, lock in ipairs(locks) do
    local first = redis.call('ZRANGE', lock.queue, 0, 0, 'WITHSCORES')
    ticket = math.min(ticket, tonumber(first[2] or ticket) - 1)
  end
  return ticket
end

-- One ticket for all the locks that a run wants: with one order over all queues the oldest run is
-- first in each of its own, so runs that want A,B and B,A cannot wait for each other.
function Queue.enter(call, locks, run, waiter, before_all)
  local ticket = before_all and ticket_before_all(call, locks) or ticket_behind_all(call, locks)
  for _, lock in ipairs(locks) do
    -- NX: whoever comes back, by a repeated command or as a new attempt of a dead one, keeps its place.
    redis.call('ZADD', lock.queue, 'NX', string.format('%.0f', ticket), run)
    Queue.write(call, lock, run, waiter)
  end
end

-- Whether a run is in one of these locks.
function Queue.is_in(locks, run)
  for _, lock in ipairs(locks) do
    if lock.holds[run] and not Holds.kept(lock, run) then
      return true
    end
  end
  return false
end

-- Whether what is parked is a copy of a run that is in: its turn comes if that one dies.
function Queue.behind_itself(call, lock, run, waiter)
  return waiter.parked and Queue.is_in(Queue.wanted(call, lock, waiter), run)
end

-- The fence of the newest entry that lets a run in without waiting. Lineage that is forged or out of
-- date admits nobody: it must name a live hold of the same owner.
function Queue.entry_of(lock, run, who)
  local kept = Holds.kept(lock, run)
  if kept or who.by_owner then
    return kept and kept.fence or Holds.entry_of(lock.holds, who.owner)
  end
  local ancestors = {}
  for ancestor in string.gmatch(who.lineage or '', '%S+') do
    ancestors[ancestor] = lock.holds[ancestor]
  end
  return Holds.entry_of(ancestors, who.owner)
end
