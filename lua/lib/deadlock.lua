-- lib/deadlock: whether a wait would never end, because the holder itself waits.

local Deadlock = {}

-- How many holds to visit before a wait counts as one that ends, and how many waiters to note for a
-- hold: a workflow can have thousands. A waiter that is missed is at worst a deadlock that is not found.
local MOST, NOTED = 100, 16

-- The key of the notes of a hold: which execution must acquire which lock before the hold can end.
local function notes(call, execution)
  return call.prefix .. 's:' .. execution
end

-- A note is compared with the queue before it is believed. The note of a waiter lives as long as its
-- place; the note of a parked execution, which has no heartbeat, for a day.
local function life(call, waiter)
  return waiter.parked and Base.DAY or waiter.expiry - call.now
end

-- `waiter.stuck` has the holds that cannot end before this waiter has its locks: those of its own call
-- stack, and of its workflow lock. A waiter without any has no notes, and its call needs nothing of this.
function Deadlock.note(call, execution, waiter, name)
  for _, hold in ipairs(waiter.stuck) do
    local noted = notes(call, hold)
    if redis.call('HLEN', noted) < NOTED then
      redis.call('HSET', noted, execution, name)
      Base.outlive(life(call, waiter), noted)
    end
  end
end

-- A heartbeat has kept the place, so the notes live on.
function Deadlock.keep(call, waiter)
  for _, hold in ipairs(waiter.stuck) do
    Base.outlive(life(call, waiter), notes(call, hold))
  end
end

function Deadlock.forget(call, execution, waiter)
  for _, hold in ipairs(waiter.stuck) do
    redis.call('HDEL', notes(call, hold), execution)
  end
end

-- The place of an execution that is said to wait for a lock, if it still does.
local function waiter_of(call, execution, name)
  local waiter = Base.decoded(redis.call('HGET', call.prefix .. 'w:' .. name, execution))
  return waiter and (waiter.parked or waiter.expiry > call.now) and waiter
end

-- Whether the holders of a lock keep a waiter out. Sharers keep out another sharer if an exclusive waiter
-- ahead of it waits for them. (A copy of a holder waits for that holder alone.)
local function is_kept_out(call, lock, execution, limit)
  if limit ~= Holds.SHARED or not Holds.readers(lock) then
    return Holds.permits(lock) > 0 and Holds.is_full(lock, limit)
  end
  for _, other in ipairs(redis.call('ZRANGE', lock.queue, 0, MOST - 1)) do
    local is_other = other ~= execution and not Holds.has(lock, other)
    local waiter = is_other and waiter_of(call, other, lock.name)
    if other == execution or waiter and Holds.limit_of(lock, waiter) ~= Holds.SHARED then
      return other ~= execution
    end
  end
  return false
end

local lock_path, place_path

-- The rest of the cycle from a place, by the first of these locks that is stuck.
local function claim_path(call, search, execution, waiter, names, but)
  for number, name in ipairs(names) do
    -- pcall: the caller does not ask for this lock, and its key can be foreign.
    local is_ours, lock = pcall(Holds.open, call, call.prefix .. 'l:' .. name)
    local limit = waiter.limits[number]
    local path = is_ours and lock ~= but and place_path(call, search, lock, execution, waiter, limit)
    if path then
      return path
    end
  end
  return nil
end

-- The rest of the cycle from a hold: the steps back to the execution that asks; nil or false without one.
-- Several permits can be stuck behind one hold, so `search.seen` has what was found.
local function hold_path(call, search, hold)
  search.left = search.left - 1
  local known = search.seen[hold]
  if known ~= nil or search.left <= 0 then
    return known and { unpack(known) }
  end
  -- While it is visited it counts as stuck: a ring of several permits closes at any of its holds.
  search.seen[hold], search.open[hold] = {}, true
  local waits = redis.call('HGETALL', notes(call, hold))
  for i = 1, #waits, 2 do
    local name = waits[i + 1]
    local waiter = waiter_of(call, waits[i], name)
    local path = waiter and claim_path(call, search, waits[i], waiter, waiter.names or { name })
    if path then
      table.insert(path, 1, waiter.label)
      search.seen[hold], search.open[hold] = { unpack(path) }, nil
      return path
    end
  end
  search.open[hold] = nil
  -- What was found stuck meanwhile can have relied on this hold.
  for each, found in pairs(search.seen) do
    if found then
      search.seen[each] = search.open[each] and found or nil
    end
  end
  search.seen[hold] = false
  return nil
end

-- The permits of the execution that asks, and those that it may join; and how many. First these: a shared
-- lock can have more holds than are visited.
local function own_permits(search, lock)
  local joins = search.joins[lock.name]
  local own, permits = { [joins or ''] = true }, joins and 1 or 0
  for mine in pairs(search.mine) do
    local hold = lock.holds[mine]
    if hold and not own[hold.fence] then
      own[hold.fence], permits = true, permits + 1
    end
  end
  return own, permits
end

-- Each of the permits has to be stuck, by at least one of the holds in the permit.
local function holders_path(call, search, lock)
  if Holds.permits(lock) > MOST then
    return nil
  end
  local stuck, permits = own_permits(search, lock)
  local path = permits > 0 and {} or nil
  for execution, hold in pairs(Holds.some(lock, MOST)) do
    local found = not stuck[hold.fence] and hold_path(call, search, execution)
    if found then
      stuck[hold.fence], permits = true, permits + 1
      path = path or found
    end
  end
  return permits == Holds.permits(lock) and path or nil
end

-- A line has one holder. If nobody holds it the first place is as good as a hold: its execution can have had
-- its turn, and wait for its lock.
local function line_path(call, search, lock, execution)
  local _, first = Holds.oldest(lock)
  first = first or redis.call('ZRANGE', lock.queue, 0, 0)[1] or execution
  if first == execution then
    return nil
  elseif search.mine[first] then
    search.line = first == search.asks and lock
    return {}
  end
  return hold_path(call, search, first)
end

-- A lock is stuck if its holders are.
function lock_path(call, search, lock, execution, limit)
  local path
  if Holds.is_line(lock) then
    path = line_path(call, search, lock, execution)
  elseif is_kept_out(call, lock, execution, limit) then
    path = holders_path(call, search, lock)
  end
  if path then
    table.insert(path, 1, lock.name)
  end
  return path
end

-- The place of somebody ahead, if it is for other locks as well. Who waits with a bound is passed, but no
-- reason to give up: only a parked execution can wait for several locks without one.
local function waits_elsewhere(call, search, lock, execution)
  local waiter = not lock.holds[execution] and waiter_of(call, execution, lock.name)
  if not waiter or not waiter.names or waiter.back or search.visited[execution] or search.left <= 0 then
    return nil
  end
  return (search.passes or waiter.parked and not waiter.deadline) and waiter
end

-- A place is stuck if its lock is; or if somebody ahead is, who waits for other locks as well. Where an
-- execution may join a permit it waits for nobody.
function place_path(call, search, lock, execution, claim, limit)
  if Holds.permit_of(lock, execution, claim, limit) then
    return nil
  end
  local path = lock_path(call, search, lock, execution, limit)
  if path then
    return path
  end
  for _, ahead in ipairs(redis.call('ZRANGE', lock.queue, 0, MOST - 1)) do
    if ahead == execution then
      return nil
    end
    local waiter = waits_elsewhere(call, search, lock, ahead)
    if waiter then
      search.left, search.visited[ahead] = search.left - 1, true
      path = claim_path(call, search, ahead, waiter, waiter.names, lock)
      search.visited[ahead] = nil
    end
    if path then
      table.insert(path, 1, waiter.label)
      table.insert(path, 1, lock.name)
      return path
    end
  end
  return nil
end

-- `passes`: the execution asks whom to pass; and `joins` has, by lock, the permits that it may join.
local function begin(stuck, passes, joins)
  local search = { mine = {}, seen = {}, open = {}, visited = {}, left = MOST, passes = passes }
  search.joins = joins or {}
  for _, hold in ipairs(stuck or {}) do
    search.mine[hold] = true
  end
  return search
end

-- The cycle, if waiting for these locks would never end: a lock, the label of its holder, the lock that
-- this holder waits for, and so on to a hold of the execution that asks. Nil if the wait can end. If that
-- hold is its own turn in a line, also this line.
function Deadlock.path(call, execution, missing, stuck)
  for i, lock in ipairs(missing.locks) do
    local limit, search = missing.limits[i], begin(stuck, false)
    search.asks = execution
    local path = not missing.fences[i] and lock_path(call, search, lock, execution, limit)
    if path then
      local line = search.line
      return path, line and line.name == path[#path] and line
    end
  end
  return nil
end

-- Whether an execution that is behind others in a queue is among those whom they wait for, or may join them.
function Deadlock.is_behind_itself(call, execution, claim, lock, limit, stuck, joins)
  return place_path(call, begin(stuck, true, joins), lock, execution, claim, limit)
end

return Deadlock
