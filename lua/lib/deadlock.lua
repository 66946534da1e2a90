-- lib/deadlock: whether a wait would never end, because who is waited for waits in turn.

local Deadlock = {}

-- Holds that are looked at before a wait counts as one that ends, and waiters that are noted for one
-- hold: a section may have thousands, and one that is missed is at worst a deadlock that is not told.
local MOST, NOTED = 100, 16
-- What is noted is held against the queues before it is believed, so it may stay behind for a while.
local LIFE = 86400000

local function waits_of(call, hold)
  local record = redis.call('HGET', call.prefix .. 'stuck', hold)
  return record and cjson.decode(record) or {}
end

-- `waiter.stuck` has the holds that cannot end before this waiter has got in: those of its own call
-- stack, and of its section.
function Deadlock.note(call, run, waiter, name)
  for _, hold in ipairs(waiter.stuck or {}) do
    local waits, noted = waits_of(call, hold), 0
    for _ in pairs(waits) do
      noted = noted + 1
    end
    if noted < NOTED then
      waits[run] = name
      redis.call('HSET', call.prefix .. 'stuck', hold, cjson.encode(waits))
      redis.call('PEXPIRE', call.prefix .. 'stuck', LIFE)
    end
  end
end

function Deadlock.forget(call, run, waiter)
  for _, hold in ipairs(waiter.stuck or {}) do
    local waits = waits_of(call, hold)
    waits[run] = nil
    if next(waits) then
      redis.call('HSET', call.prefix .. 'stuck', hold, cjson.encode(waits))
    else
      redis.call('HDEL', call.prefix .. 'stuck', hold)
    end
  end
end

-- The place of a run that is said to wait for a lock, if it still does.
local function waiter_of(call, run, name)
  local record = redis.call('HGET', call.prefix .. 'w:' .. name, run)
  local waiter = record and cjson.decode(record)
  return waiter and (waiter.parked or waiter.expiry > call.now) and waiter
end

local lock_path

-- From a hold on: the steps by which it comes back to the run that asks, if it does.
local function hold_path(call, search, hold)
  search.left = search.left - 1
  if search.mine[hold] then
    return {}
  end
  if search.seen[hold] or search.left <= 0 then
    return nil
  end
  search.seen[hold] = true
  for run, name in pairs(waits_of(call, hold)) do
    local waiter = waiter_of(call, run, name)
    for i, wanted in ipairs(waiter and (waiter.names or { name }) or {}) do
      local lock = Holds.open(call, call.prefix .. 'l:' .. wanted)
      local path = lock_path(call, search, lock, waiter.limits[i])
      if path then
        table.insert(path, 1, waiter.who)
        return path
      end
    end
  end
  return nil
end

-- A lock is stuck if each of its entries is, by one of its holds at least.
function lock_path(call, search, lock, limit)
  if lock.entries < limit then
    return nil
  end
  local path, stuck = nil, {}
  for run, hold in pairs(lock.holds) do
    local found = not stuck[hold.fence] and hold_path(call, search, run)
    if found then
      stuck[hold.fence] = true
      path = path or found
    end
  end
  for fence in pairs(lock.fences) do
    if not stuck[fence] then
      return nil
    end
  end
  table.insert(path, 1, lock.name)
  return path
end

-- The way round if waiting for these locks would never end: a lock, who has it and waits, the lock
-- that this one waits for, … back to a hold of the run that asks. Nil if it may end.
function Deadlock.path(call, locks, limits, stuck)
  for i, lock in ipairs(locks) do
    local search = { mine = {}, seen = {}, left = MOST }
    for _, hold in ipairs(stuck or {}) do
      search.mine[hold] = true
    end
    local path = stuck and lock_path(call, search, lock, limits[i])
    if path then
      return path
    end
  end
  return nil
end
