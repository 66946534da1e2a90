-- survey: Return of some locks the first few holders and waiters, and change nothing.
-- KEYS[1..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1] most_holds: count, holds to return, for each lock
-- ARGV[2] most_waiters: count, waiters to return, for each lock
-- Reply {ms, {held, waiting, parked, holds, waiters}, …}: server's time; per lock how many, and the first; empty for a foreign key
-- Keeps: reads only, and of a lock with many holds or waiters no more than it returns
-- Uses: lib/base, lib/facts

local locks, most_holds, most_waiters = KEYS, tonumber(ARGV[1]), tonumber(ARGV[2])
local now = math.floor(Base.micros() / 1000)
-- A lock has an index long before it is so large (lib/holds), so a larger key is foreign.
local LARGEST = 1000

local function by_fence(one, other)
  return tonumber(one[3]) < tonumber(other[3])
end

local function few_holds(key)
  local found = Facts.every(key, now)
  table.sort(found, by_fence)
  return #found, { unpack(found, 1, math.min(#found, most_holds)) }
end

local function many_holds(key, ends, fences)
  local found = {}
  local first = redis.call('ZRANGEBYSCORE', fences, '-inf', '+inf', 'LIMIT', 0, most_holds)
  for _, execution in ipairs(first) do
    local told = redis.call('HMGET', key, execution, '@' .. execution)
    found[#found + 1] = Facts.of(key, now, execution, told[1], told[2])
  end
  return redis.call('ZCOUNT', ends, string.format('(%.0f', now), '+inf'), found
end

-- The places of the first waiters, as they are stored, without the lapsed ones.
local function first_waiters(queue, waiters)
  local found = {}
  local places = redis.call('ZRANGEBYSCORE', queue, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, most_waiters)
  for i = 1, #places, 2 do
    local record = redis.call('HGET', waiters, places[i])
    local waiter = Base.decoded(record)
    if waiter and (waiter.parked or waiter.expiry > now) then
      found[#found + 1] = { places[i], (i + 1) / 2, places[i + 1], record }
    end
  end
  return found
end

local function tell(key)
  local prefix, name = string.match(key, '^([^}]*}:)l:(.*)$')
  local ends, fences = prefix .. 'e:' .. name, prefix .. 'f:' .. name
  local held, holds
  if redis.call('EXISTS', ends, fences) == 2 then
    held, holds = many_holds(key, ends, fences)
  elseif redis.call('HLEN', key) <= LARGEST then
    held, holds = few_holds(key)
  else
    error('foreign')
  end
  local queue = prefix .. 'q:' .. name
  if redis.call('EXISTS', queue) == 0 then
    return { held, 0, 0, holds, {} }
  end
  local waiting, parked = redis.call('ZCARD', queue), redis.call('HLEN', prefix .. 'm:' .. name)
  return { held, waiting, parked, holds, first_waiters(queue, prefix .. 'w:' .. name) }
end

local reply = { now }
for i, key in ipairs(locks) do
  -- pcall: a foreign key must not hide the others.
  local is_ours, found = pcall(tell, key)
  reply[i + 1] = is_ours and found or {}
end
return reply
