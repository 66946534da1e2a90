-- survey: Return of some locks the first few holders and waiters, or certain holders, and change nothing.
-- KEYS[1..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1] most_holds: count, holds to return, for each lock
-- ARGV[2] most_waiters: count, waiters to return, for each lock
-- ARGV[3] only: ids with spaces between, the executions whose holds to return instead of the first few; empty for these
-- Reply {ms, {held, waiting, parked, holds, waiters}, …}: server's time; per lock how many, and the first; {error} for a foreign key
-- Keeps: reads only, and of a lock with many holds or waiters no more than it returns
-- Uses: lib/module, lib/base

local locks, most_holds, most_waiters, only = KEYS, tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local now = math.floor(Base.micros() / 1000)
-- A lock has an index long before it is so large (lib/holds), so a larger key is foreign.
local LARGEST = 1000

local function foreign(key)
  error('RELOCK-FOREIGN ' .. key)
end

-- What there is to tell of a hold; nil if it has lapsed.
local function facts(key, execution, record, label)
  local hold = Base.parse(record) or foreign(key)
  if hold.expiry > now then
    local left = math.min(hold.expiry - now, Base.longest(hold.bound))
    local shared = hold.shared and 1 or 0
    return { execution, left, hold.fence, hold.attempt, hold.owner, label or '', shared }
  end
end

local function by_fence(one, other)
  local later = tonumber(one[3]) - tonumber(other[3])
  return later < 0 or later == 0 and one[1] < other[1]
end

local function is_wanted(execution)
  return string.find(' ' .. only .. ' ', ' ' .. execution .. ' ', 1, true)
end

local function few_holds(key)
  local fields, records, holds, found = redis.call('HGETALL', key), {}, {}, {}
  for i = 1, #fields, 2 do
    records[fields[i]] = fields[i + 1]
  end
  for execution, record in pairs(records) do
    if string.sub(execution, 1, 1) ~= '@' then
      holds[#holds + 1] = facts(key, execution, record, records['@' .. execution])
    end
  end
  table.sort(holds, by_fence)
  for i, hold in ipairs(holds) do
    if only == '' and i <= most_holds or is_wanted(hold[1]) then
      found[#found + 1] = hold
    end
  end
  return #holds, found
end

local function many_holds(key, ends, fences)
  local held, executions, found = redis.call('ZCOUNT', ends, string.format('(%.0f', now), '+inf'), {}, {}
  if only == '' then
    -- Those that have lapsed can be the first.
    local last = most_holds + redis.call('ZCARD', ends) - held
    executions = redis.call('ZRANGEBYSCORE', fences, '-inf', '+inf', 'LIMIT', 0, last)
  end
  for execution in string.gmatch(only, '%S+') do
    executions[#executions + 1] = redis.call('HEXISTS', key, execution) == 1 and execution or nil
  end
  for _, execution in ipairs(executions) do
    if only ~= '' or #found < most_holds then
      local told = redis.call('HMGET', key, execution, '@' .. execution)
      found[#found + 1] = facts(key, execution, told[1], told[2])
    end
  end
  table.sort(found, by_fence)
  return held, found
end

-- The places of the first waiters behind those that run, as they are stored, without the lapsed ones.
local function first_waiters(queue, waiters, running)
  local found = {}
  local range = { '-inf', '+inf', 'WITHSCORES', 'LIMIT', running, most_waiters }
  local places = redis.call('ZRANGEBYSCORE', queue, unpack(range))
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
  if not name then
    foreign(key)  -- the one that never exists: in a cluster a call names it last
  end
  local ends, fences = prefix .. 'e:' .. name, prefix .. 'f:' .. name
  local held, holds
  -- Of a lock that nobody has looked at any more the index can outlive the holds.
  if redis.call('EXISTS', key, ends, fences) == 3 then
    held, holds = many_holds(key, ends, fences)
  elseif redis.call('HLEN', key) <= LARGEST then
    held, holds = few_holds(key)
  else
    foreign(key)
  end
  local queue = prefix .. 'q:' .. name
  if redis.call('EXISTS', queue) == 0 then
    return { held, 0, 0, holds, {} }
  end
  local waiting, parked = redis.call('ZCARD', queue), redis.call('HLEN', prefix .. 'm:' .. name)
  local waiters = prefix .. 'w:' .. name
  local running = Base.running(key, queue, waiters)
  return { held, waiting - running, parked, holds, first_waiters(queue, waiters, running) }
end

local reply = { now }
for i, key in ipairs(locks) do
  -- pcall: a foreign key must not hide the others.
  local is_ours, found = pcall(tell, key)
  if not is_ours and not Base.is_foreign(found) then
    error(found, 0)
  end
  reply[i + 1] = is_ours and found or { Base.said(found) }
end
return reply
