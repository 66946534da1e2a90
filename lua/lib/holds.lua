-- lib/holds: a lock is the set of its live holds; its entries are the fences among them.

local Holds = {}

-- The nonce of a hold that is kept for a run which is still to come: no attempt has this one.
Holds.KEPT = '-'

-- A lapsed hold is dropped before anything is decided: its lease ended by the server's clock,
-- not when somebody happened to look, and a late renewal must not find it again.
function Holds.open(call, key)
  if call.locks[key] then
    return call.locks[key]
  end
  local name = string.sub(key, string.len(call.prefix) + 3)
  local lock = {
    key = key,
    now = call.now,
    name = name,
    queue = call.prefix .. 'q:' .. name,
    waiters = call.prefix .. 'w:' .. name,
    messages = call.prefix .. 'm:' .. name,
    holds = {},
    entries = 0,
    fences = {},
    latest = 0,
  }
  local fields = redis.call('HGETALL', key)
  for i = 1, #fields, 2 do
    local run, record = fields[i], fields[i + 1]
    if string.sub(run, 1, 1) ~= '@' then
      local expiry, fence, nonce, owner, bound = string.match(record, '^(%d+) (%d+) (%S+) (%S+) (%l)$')
      if not expiry then
        error('RELOCK-FOREIGN ' .. key)
      end
      expiry = tonumber(expiry)
      local longest = Base.longest(bound)
      if expiry > call.now + longest then
        -- Written, as each look would put it off again. Whoever lives renews it before.
        expiry = call.now + longest
        record = string.format('%.0f %s %s %s %s', expiry, fence, nonce, owner, bound)
        redis.call('HSET', key, run, record)
      end
      if expiry > call.now then
        Holds.count(lock, run, { expiry = expiry, fence = fence, nonce = nonce, owner = owner })
      else
        redis.call('HDEL', key, run, '@' .. run)
      end
    end
  end
  call.locks[key] = lock
  return lock
end

function Holds.count(lock, run, hold)
  if not lock.fences[hold.fence] then
    lock.fences[hold.fence] = 0
    lock.entries = lock.entries + 1
  end
  lock.fences[hold.fence] = lock.fences[hold.fence] + 1
  lock.latest = math.max(lock.latest, hold.expiry)
  lock.holds[run] = hold
end

local function outlive_holds(lock)
  redis.call('PEXPIREAT', lock.key, string.format('%.0f', lock.latest + Base.GRACE))
end

function Holds.write(lock, run, hold, who)
  if lock.holds[run] then
    Holds.drop(lock, run)
  end
  Holds.count(lock, run, hold)
  redis.call('HSET', lock.key, run, Base.record(hold, lock.now), '@' .. run, who)
  outlive_holds(lock)
end

-- Only ever longer: the holder may have asked for more than this since.
function Holds.extend(lock, run, expiry)
  local hold = lock.holds[run]
  if hold.expiry < expiry then
    hold.expiry = expiry
    lock.latest = math.max(lock.latest, expiry)
    redis.call('HSET', lock.key, run, Base.record(hold, lock.now))
    outlive_holds(lock)
  end
end

function Holds.drop(lock, run)
  local hold = lock.holds[run]
  lock.holds[run] = nil
  redis.call('HDEL', lock.key, run, '@' .. run)
  lock.fences[hold.fence] = lock.fences[hold.fence] - 1
  if lock.fences[hold.fence] == 0 then
    lock.fences[hold.fence] = nil
    lock.entries = lock.entries - 1
  end
end

-- The hold that is kept for a run, if there is one.
function Holds.kept(lock, run)
  local hold = lock.holds[run]
  return hold and hold.nonce == Holds.KEPT and hold or nil
end

-- The fence of the newest entry that an owner has among some holds.
function Holds.entry_of(holds, owner)
  local fence
  for _, hold in pairs(holds) do
    if hold.owner == owner and (not fence or tonumber(hold.fence) > tonumber(fence)) then
      fence = hold.fence
    end
  end
  return fence
end

-- The hold of the oldest entry: the one to name when somebody asks who is in the way.
function Holds.oldest(lock)
  local found, run
  for each, hold in pairs(lock.holds) do
    if not found or tonumber(hold.fence) < tonumber(found.fence) then
      found, run = hold, each
    end
  end
  return found, run
end

-- When the next lease ends, in ms from now: the moment at which a waiter should look again.
function Holds.next_lapse(call, lock)
  local soonest
  for _, hold in pairs(lock.holds) do
    if not soonest or hold.expiry < soonest then
      soonest = hold.expiry
    end
  end
  return soonest and soonest - call.now or 0
end
