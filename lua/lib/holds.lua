-- lib/holds: a lock is the set of its live holds; a permit is all holds with one fencing token.

local Holds = {}

-- The limit of a claim that shares the lock. All shared holds are in one permit, and a lock that has this
-- permit has no other.
Holds.SHARED = 0

-- Up to so many holds are all read at once. A lock with more holds has an index beside them, three sorted
-- sets, and a call reads no more than it needs: a semaphore of thousands costs as much as a small lock.
-- The holds alone are the truth: an index that does not fit them is deleted and built again from them.
local FEW = 32

local function foreign(lock)
  error('RELOCK-FOREIGN ' .. lock.key)
end

local function count(lock, execution, hold)
  local others = lock.fences[hold.fence] or 0
  lock.fences[hold.fence] = others + 1
  lock.permits = others == 0 and lock.permits + 1 or lock.permits
  lock.latest = math.max(lock.latest, hold.expiry)
  lock.holds[execution] = hold
  lock.count = lock.count + 1
end

-- A permit can have holds of several owners: a cooldown has an owner of its own.
local function of_owner(execution, hold)
  return hold.owner .. ' ' .. hold.fence .. ' ' .. execution
end

local function note(lock, execution, hold, stays)
  local index = lock.index
  redis.call('ZADD', index.ends, string.format('%.0f', hold.expiry), execution)
  if not stays then
    redis.call('ZADD', index.fences, hold.fence, execution)
    redis.call('ZADD', index.owners, 0, hold.fence, 0, of_owner(execution, hold))
    lock.permits = nil
  end
end

local function outlive_holds(lock, expiry)
  if lock.indexed then
    local index = lock.index
    Base.outlive(expiry - lock.now, lock.key, index.ends, index.fences, index.owners)
  else
    redis.call('PEXPIREAT', lock.key, string.format('%.0f', lock.latest + Base.GRACE))
  end
end

-- Whether there is an index. Deletes what is left of an index whose lock, or part, was deleted or evicted.
local function has_index(lock)
  local ends, fences, owners = lock.index.ends, lock.index.fences, lock.index.owners
  -- A key that is named twice counts twice, so the result says whether the lock's own key exists.
  local there = redis.call('EXISTS', lock.key, ends, ends, fences, fences, owners, owners)
  if there > 1 and there < 7 then
    redis.call('DEL', ends, fences, owners)
  end
  return there == 7
end

local function build_index(lock)
  lock.indexed = true
  for execution, hold in pairs(lock.holds) do
    note(lock, execution, hold)
  end
  for _, key in pairs(lock.index) do
    redis.call('PEXPIREAT', key, string.format('%.0f', lock.latest + Base.GRACE))
  end
end

local function open_with_index(lock)
  setmetatable(lock.holds, {
    __index = function(_, execution)
      local record = redis.call('HGET', lock.key, execution)
      local hold = record and (Base.parse(record) or foreign(lock))  -- false is stored, too
      rawset(lock.holds, execution, hold)
      return hold
    end,
  })
end

local function open_by_reading(lock)
  local fields = redis.pcall('HGETALL', lock.key)
  if fields.err and string.find(fields.err, 'WRONGTYPE', 1, true) then
    foreign(lock)
  elseif fields.err then
    fields = redis.call('HGETALL', lock.key)
  end
  for i = 1, #fields, 2 do
    local execution = fields[i]
    if string.sub(execution, 1, 1) ~= '@' then
      local hold = Base.parse(fields[i + 1]) or foreign(lock)
      local longest = Base.longest(hold.bound)
      if hold.expiry > lock.now + longest then
        -- Stored, or each look would put the end off again. A live holder renews it before.
        hold.expiry = lock.now + longest
        local rest = string.match(fields[i + 1], ' .*$')
        redis.call('HSET', lock.key, execution, string.format('%.0f%s', hold.expiry, rest))
      end
      if hold.expiry > lock.now then
        count(lock, execution, hold)
      else
        redis.call('HDEL', lock.key, execution, '@' .. execution)
      end
    end
  end
  if #fields > 4 * FEW then
    build_index(lock)
  end
end

local function read(lock)
  -- Each hold by its execution, and how many; how many have a fencing token; how many tokens there are.
  lock.holds, lock.count, lock.fences, lock.permits, lock.latest = {}, 0, {}, 0, 0
  lock.indexed = has_index(lock)
  if lock.indexed then
    lock.permits = nil
    open_with_index(lock)
  else
    open_by_reading(lock)
  end
end

local function rebuild(lock)
  redis.call('DEL', lock.index.ends, lock.index.fences, lock.index.owners)
  read(lock)
end

-- Drop lapsed holds before anything is decided: a lease ends by the server's clock, not when somebody
-- looks, and a late renewal must not find the hold again.
local function prune(lock)
  if not lock.indexed then
    return
  end
  local now = string.format('%.0f', lock.now)
  for _, execution in ipairs(redis.call('ZRANGEBYSCORE', lock.index.ends, '-inf', now)) do
    local hold = lock.holds[execution]
    if not hold then
      return rebuild(lock)
    elseif hold.expiry > lock.now and hold.expiry <= lock.now + Base.longest(hold.bound) then
      -- A renewal does not reach the index while the lock's slot moves between two nodes.
      redis.call('ZADD', lock.index.ends, string.format('%.0f', hold.expiry), execution)
    else
      Holds.drop(lock, execution)
    end
  end
end

-- Before an index keeps anybody out, it must fit the holds, and no hold must be from before the clock was
-- set back.
local function verify(lock)
  if not lock.indexed then
    return
  end
  local ends = lock.index.ends
  local last = redis.call('ZREVRANGE', ends, 0, 0)[1]
  local hold = last and lock.holds[last]
  local is_in_time = hold and hold.expiry <= lock.now + Base.longest(hold.bound)
  if not is_in_time or redis.call('ZCARD', ends) ~= redis.call('HLEN', lock.key) / 2 then
    rebuild(lock)
  end
end

-- The lock of a key, as it is now: lapsed holds are dropped, and an index fits. Its fields, beside its keys:
--   holds, count, fences, permits, latest, indexed: see `read`; only `holds` and `permits` with an index,
--     where each hold is read when it is asked for, and `permits` is nil until it is counted
--   promised, soon: the permits that messages on their way ahead of the caller will need, and of these the
--     ones of messages that are not late (lib/parked)
--   look: when to look at the lock again, of what was seen along its queue (lib/parked)
--   index_of_claim: its number among the locks of the claim; queued: whether somebody waits (acquire, release)
--   released, to_leave: how far its release has come (release)
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
    index = {
      ends = call.prefix .. 'e:' .. name,
      fences = call.prefix .. 'f:' .. name,
      owners = call.prefix .. 'o:' .. name,
    },
  }
  read(lock)
  verify(lock)
  prune(lock)
  call.locks[key] = lock
  return lock
end

-- A line is a lock whose waiters are calls, in the order in which they were sent (lib/lines). Its places are
-- reserved before their messages come (place), and are kept until their executions have ended.
function Holds.is_line(lock)
  return string.sub(lock.name, 1, 6) == 'order\t'
end

-- How many permits are live.
function Holds.permits(lock)
  if not lock.permits then
    local holds_and_permits = redis.call('ZCARD', lock.index.owners)
    lock.permits = holds_and_permits - redis.call('ZCARD', lock.index.fences)
  end
  return lock.permits
end

-- How many holds are in a permit.
function Holds.size(lock, fence)
  return lock.indexed and redis.call('ZCOUNT', lock.index.fences, fence, fence) or lock.fences[fence] or 0
end

-- The token of the permit of all sharers, if the lock is shared. Any hold tells, as a shared lock has no
-- other permit.
function Holds.readers(lock)
  local hold = Holds.oldest(lock)
  return hold and hold.shared and hold.fence or nil
end

-- Whether a claim with this limit has to wait, given the permits `promised` to executions ahead of it,
-- `exclusive` and `shared`; nil for none.
function Holds.is_full(lock, limit, promised)
  local permits, exclusive = Holds.permits(lock), promised and promised.exclusive or 0
  if limit == Holds.SHARED then
    return exclusive > 0 or permits > 0 and not Holds.readers(lock)
  end
  local is_shared = promised and promised.shared > 0 or permits == 1 and Holds.readers(lock) ~= nil
  return is_shared or permits + exclusive >= limit
end

-- The limit of a waiter's claim to this lock.
function Holds.limit_of(lock, waiter)
  for i, name in ipairs(waiter.names or {}) do
    if name == lock.name then
      return waiter.limits[i]
    end
  end
  return waiter.limits[1]
end

function Holds.write(lock, execution, hold, label)
  -- A hold that joins a permit gets the permit's mode: a shared claim that re-enters is as exclusive as
  -- its caller.
  hold.shared = hold.shared and (Holds.size(lock, hold.fence) == 0 or Holds.readers(lock) ~= nil)
  local before = lock.holds[execution]
  local stays = before and before.fence == hold.fence and before.owner == hold.owner
  if before and not stays then
    Holds.drop(lock, execution)
  end
  if not stays and not lock.indexed then
    count(lock, execution, hold)
  end
  lock.holds[execution], lock.latest = hold, math.max(lock.latest, hold.expiry)
  redis.call('HSET', lock.key, execution, Base.record(hold, lock.now), '@' .. execution, label)
  if lock.indexed then
    note(lock, execution, hold, stays)
  elseif lock.count > FEW then
    build_index(lock)
  end
  outlive_holds(lock, hold.expiry)
end

-- Never shorten a lease: the holder can have extended it since.
function Holds.extend(lock, execution, expiry)
  local hold = lock.holds[execution]
  if hold.expiry < expiry then
    hold.expiry = expiry
    lock.latest = math.max(lock.latest, expiry)
    redis.call('HSET', lock.key, execution, Base.record(hold, lock.now))
    if lock.indexed then
      redis.call('ZADD', lock.index.ends, string.format('%.0f', expiry), execution)
    end
    outlive_holds(lock, expiry)
  end
end

-- Make the only hold of the lock shared, or exclusive again.
function Holds.share(lock, execution, shared)
  local hold = lock.holds[execution]
  hold.shared = shared
  redis.call('HSET', lock.key, execution, Base.record(hold, lock.now))
end

function Holds.drop(lock, execution)
  local hold = lock.holds[execution]
  local others = Holds.size(lock, hold.fence) - 1
  redis.call('HDEL', lock.key, execution, '@' .. execution)
  rawset(lock.holds, execution, nil)
  if not lock.indexed then
    lock.fences[hold.fence] = others > 0 and others or nil
    lock.permits = others > 0 and lock.permits or lock.permits - 1
    lock.count = lock.count - 1
    return
  end
  redis.call('ZREM', lock.index.ends, execution)
  redis.call('ZREM', lock.index.fences, execution)
  local text = of_owner(execution, hold)
  redis.call('ZREM', lock.index.owners, text, others > 0 and text or hold.fence)
  lock.permits = nil
end

-- The hold that is kept for an execution, if there is one.
function Holds.kept(lock, execution)
  local hold = lock.holds[execution]
  return hold and hold.attempt == Base.KEPT and hold or nil
end

-- Whether an execution holds the lock. A hold that is kept for it does not count.
function Holds.has(lock, execution)
  local hold = lock.holds[execution]
  return hold and hold.attempt ~= Base.KEPT
end

-- Every hold; of a lock with an index the first `most`.
function Holds.some(lock, most)
  if not lock.indexed then
    return lock.holds
  end
  local found = {}
  local last = most == math.huge and -1 or most - 1
  for _, execution in ipairs(redis.call('ZRANGE', lock.index.fences, 0, last)) do
    found[execution] = lock.holds[execution]
  end
  return found
end

-- The token of the newest permit that an owner has among some holds.
function Holds.newest(holds, owner)
  local fence
  for _, hold in pairs(holds) do
    if hold.owner == owner and (not fence or tonumber(hold.fence) > tonumber(fence)) then
      fence = hold.fence
    end
  end
  return fence
end

-- The token of the newest permit of an owner.
function Holds.newest_of(lock, owner)
  if not lock.indexed then
    return Holds.newest(lock.holds, owner)
  end
  local from, to = '[' .. owner .. ' \255', '[' .. owner .. ' '
  local last = redis.call('ZREVRANGEBYLEX', lock.index.owners, from, to, 'LIMIT', 0, 1)[1]
  return last and string.match(last, '(%d+) %S+$')
end

-- The hold of the oldest permit, the first by its id, and its execution: the holder to name in a conflict.
function Holds.oldest(lock)
  if lock.indexed then
    local execution = redis.call('ZRANGE', lock.index.fences, 0, 0)[1]
    return execution and lock.holds[execution], execution
  end
  local found, execution
  for each, hold in pairs(lock.holds) do
    local later = found and tonumber(hold.fence) - tonumber(found.fence) or -1
    if later < 0 or later == 0 and each < execution then
      found, execution = hold, each
    end
  end
  return found, execution
end

-- Adapt a shared hold that is kept for an execution with an exclusive claim, which would otherwise wait
-- for its own hold. The hold becomes exclusive, or ends if others share it.
function Holds.claim_kept(lock, execution, limit)
  local kept = Holds.kept(lock, execution)
  if not kept or not kept.shared or limit == Holds.SHARED then
    return
  elseif Holds.size(lock, kept.fence) > 1 then
    Holds.drop(lock, execution)
  else
    Holds.share(lock, execution, false)
  end
end

-- When the next lease ends, in ms from now: the moment at which a waiter should look again.
function Holds.next_lapse(lock)
  local soonest
  if lock.indexed then
    soonest = tonumber(redis.call('ZRANGE', lock.index.ends, 0, 0, 'WITHSCORES')[2])
  else
    for _, hold in pairs(lock.holds) do
      if not soonest or hold.expiry < soonest then
        soonest = hold.expiry
      end
    end
  end
  return soonest and soonest - lock.now or 0
end

local function of_kin(lock, execution, claim)
  local kept = Holds.kept(lock, execution)
  if kept then
    return kept.fence
  end
  if claim.by_owner then
    return Holds.newest_of(lock, claim.owner)
  end
  local ancestors = {}
  for ancestor in string.gmatch(claim.ancestors or '', '%S+') do
    ancestors[ancestor] = ancestor ~= execution and lock.holds[ancestor] or nil
  end
  return Holds.newest(ancestors, claim.owner)
end

-- The token of the newest permit that an execution can join without waiting. Forged or outdated ancestors
-- admit nobody: an ancestor must have a live hold of the same owner. An exclusive claim cannot join a
-- shared permit: the other sharers rely on what they read.
function Holds.permit_of(lock, execution, claim, limit)
  local fence = of_kin(lock, execution, claim)
  if fence and limit ~= Holds.SHARED and Holds.readers(lock) then
    return nil
  end
  return fence
end

-- Whether a holder joined the permit of its kin; also for a repeated command.
function Holds.is_reentered(lock, execution, claim)
  local hold = lock.holds[execution]
  if not hold.shared then
    return Holds.size(lock, hold.fence) > 1
  elseif not claim.by_owner then
    return of_kin(lock, execution, claim) ~= nil
  elseif lock.indexed then
    local from, to = '[' .. hold.owner .. ' ', '[' .. hold.owner .. ' \255'
    return #redis.call('ZREVRANGEBYLEX', lock.index.owners, to, from, 'LIMIT', 0, 2) > 1
  end
  for other, its in pairs(lock.holds) do
    if other ~= execution and its.owner == hold.owner then
      return true
    end
  end
  return false
end

return Holds
