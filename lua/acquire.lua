-- acquire: Acquire one or more locks for an execution, all or none, or queue for them.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] tombstone: string, how the execution ended, if it did
-- KEYS[3..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1.1] execution: id, the execution of one message
-- ARGV[1.2] attempt: id, this attempt to execute the message
-- ARGV[1.3] owner: id, who can re-enter
-- ARGV[1.4] lease: ms, life of the hold without renewal
-- ARGV[1.5] by_owner: 1 or 0, whether every execution of the owner can re-enter
-- ARGV[1.6] inbox: id, the process that is notified of grants and losses
-- ARGV[1.7..] limit: count, permits at the same time, 0 to share the lock; one per lock
-- ARGV[2] label: text, the holder for people
-- ARGV[3] ancestors: ids with spaces between, the executions whose holds can be re-entered; empty or missing for none
-- ARGV[4] place: text, how to queue as JSON: `wait`, or `message` and what belongs to it; with neither, or missing, it does not queue
-- Reply {HELD, fence, reentered, …}: the execution has all locks; a pair per lock, and `resumed` if it was parked until now
-- Reply {WAIT, rank, ms}: queued at this rank; look again after ms, when the next lease ends
-- Reply {PARKED, rank}: the message is in the queue at this rank
-- Reply {FULL, index, count, bytes}: no room: so many messages are parked at the lock with this index; index 0 for all locks
-- Reply {BUSY, index, ms, fence, owner, label, waiting, parked, shared, kept}: another holds it; is this one parked, the hold shared, kept?
-- Reply {DEADLOCK, lock, label, …}: waiting would never end: the holder of the lock waits for the next lock, and so on
-- Reply {ATTEMPT, ms, label}: another attempt of the same execution lives, for ms more without renewal
-- Reply {ENDED}: the execution, or this attempt, has ended already
-- Reply {ENDED, replaced}: it has not begun, and will not: another one has taken its place
-- Reply {ENDED, retried}: it has ended, and has sent its retry
-- Keeps: at most `limit` live permits; nobody beside sharers; re-entry never waits; it passes only those who wait for it; idempotent
-- Uses: lib/publish

local meta, tombstone, first = KEYS[1], KEYS[2], KEYS[3]
local words, label, ancestors, place = ARGV[1], ARGV[2], ARGV[3] or '', ARGV[4]
local keys = KEYS
local execution, attempt, owner, lease, by_owner, inbox, every_limit =
  string.match(words, '^(%S+) (%S+) (%S+) (%d+) ([01]) (%S+) (.+)$')
lease, by_owner = tonumber(lease), by_owner == '1'

local prefix = string.sub(meta, 1, -5)
local name = string.sub(first, string.len(prefix) + 3)
local queue, ends = prefix .. 'q:' .. name, prefix .. 'e:' .. name
local is_parked = redis.call('HEXISTS', prefix .. 'parked', execution) == 1
local is_free = #keys == 3 and not is_parked and redis.call('EXISTS', tombstone, first, queue, ends) == 0

-- The short way: one lock that nobody holds or waits for, and an execution that is not parked. Nearly every
-- call is of this kind, and this takes a quarter of the time of the code below. The result is the same
-- (tests/lua/test_short_ways_same.py). lib/base explains next_fence and record.
if is_free then
  local time = redis.call('TIME')
  local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('HGET', meta, 'fence') or 0)
  local fence = string.format('%.0f', math.max(last + 1, micros))
  redis.call('HSET', meta, 'fence', fence)
  local _, exponent = math.frexp(lease)
  local letter = every_limit == '0' and 65 or 97
  local expiry, bound = math.floor(micros / 1000) + lease, string.char(letter + math.min(exponent, 25))
  local record = string.format('%.0f %s %s %s %s', expiry, fence, attempt, owner, bound)
  redis.call('HSET', first, execution, record, '@' .. execution, inbox .. ' ' .. label)
  redis.call('PEXPIRE', first, lease + 60000)
  return { ok = 'HELD ' .. fence .. ' 0' }
end

-- Uses: lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/lines, lib/turns, lib/claim

local call = Base.begin(meta)
local locks, limits, is_known = {}, {}, is_parked
for limit in string.gmatch(every_limit, '%d+') do
  table.insert(limits, tonumber(limit))
end
for i = 3, #keys do
  local lock = Holds.open(call, keys[i])
  lock.index_of_claim = i - 2
  lock.queued = redis.call('EXISTS', lock.queue) == 1
  is_known = is_known or lock.holds[execution]
  locks[i - 2] = lock
end
-- A message that was resumed, or a step for which a lock is kept, need not wait for memory as a newcomer.
if is_known then
  Base.write_without_memory(prefix)
end

-- How to queue, if at all: in a process that has heartbeats, or as a message (see lib/parked).
local asked = place and cjson.decode(place)
-- The holds that cannot end before this execution has its locks, whether it queues or not.
local stuck = asked and asked.stuck
asked = asked and (asked.wait or asked.message) and asked

local me = {
  call = call,
  execution = execution,
  attempt = attempt,
  owner = owner,
  lease = lease,
  inbox = inbox,
  label = label,
  by_owner = by_owner,
  ancestors = ancestors,
  locks = locks,
  limits = limits,
  asked = asked,
  is_parked = is_parked,
}

local function hold(lock, fence)
  local shared = limits[lock.index_of_claim] == Holds.SHARED
  -- A copy must not shorten what the client has extended since: a dedup marker, by the sender of the call.
  local before = lock.holds[execution]
  local is_copy = before and before.attempt == attempt
  local expiry = math.max(call.now + lease, is_copy and before.expiry or 0)
  local new = { expiry = expiry, fence = fence, attempt = attempt, owner = owner, shared = shared }
  Holds.write(lock, execution, new, inbox .. ' ' .. label)
end

-- What this attempt does not hold, with the token of the permit that it may join there now, or false (and
-- these by name); and the index of the first lock that is not free.
local function sort_out(ahead)
  local missing, blocked = Claim.missing(me), nil
  missing.fences, missing.joins = {}, {}
  for number, lock in ipairs(missing.locks) do
    local i, limit = lock.index_of_claim, missing.limits[number]
    local fence = Holds.permit_of(lock, execution, me, limit) or false
    missing.fences[number] = fence
    missing.joins[lock.name] = fence or nil
    if not fence and (ahead[i] or Holds.is_full(lock, limit, lock.promised)) then
      blocked = blocked or i
    end
  end
  return missing, blocked
end

local function take(missing)
  local new
  for i, lock in ipairs(missing.locks) do
    local joined = missing.fences[i] or missing.limits[i] == Holds.SHARED and Holds.readers(lock)
    new = new or not joined and Base.next_fence(meta, call.micros)
    hold(lock, joined or new)
  end
  if #missing.locks == 0 then
    Base.promise_again(meta)
  end
  local reply = { 'HELD' }
  for _, lock in ipairs(locks) do
    -- A repeated command renews the lease: this reply promises the whole of it.
    Holds.extend(lock, execution, call.now + lease)
    table.insert(reply, lock.holds[execution].fence)
    table.insert(reply, Holds.is_reentered(lock, execution, me) and 1 or 0)
  end
  if is_parked then
    table.insert(reply, 'resumed')
  end
  return { ok = table.concat(reply, ' ') }
end

local function busy(index)
  local lock = locks[index]
  local waiting = redis.call('ZCARD', lock.queue)
  local parked = redis.call('HEXISTS', lock.messages, execution)
  local oldest, holder = Holds.oldest(lock)
  if not oldest then
    return { 'BUSY', index, 0, '', '', '', waiting, parked, 0, 0 }
  end
  local text = redis.call('HGET', lock.key, '@' .. holder) or ''
  local left, shared = oldest.expiry - call.now, oldest.shared and 1 or 0
  local kept = Holds.kept(lock, holder) and 1 or 0
  return { 'BUSY', index, left, oldest.fence, oldest.owner, text, waiting, parked, shared, kept }
end

local function parked(lock)
  return { 'PARKED', redis.call('ZRANK', lock.queue, execution) or 0 }
end

local function park(missing, index)
  local full = Claim.full(me, missing.locks)
  Claim.leave_other_places(me, full and {} or missing.locks)
  if full then
    return { 'FULL', unpack(full) }
  end
  Claim.park(me, missing)
  return parked(locks[index])
end

-- The reply to a command that has parked the message before is given again: it was lost, perhaps.
local function parked_before(at)
  for _, lock in ipairs(locks) do
    Turns.promote(call, lock)
  end
  Base.promise_again(meta)
  return parked(at)
end

-- The reply to an execution, or an attempt, that must not go on.
local function refusal()
  -- A command can arrive after its own release, if the client sent it again on a new connection.
  local ended = redis.call('GET', tombstone)
  if Base.is_over(ended) then
    -- Its parked message, wherever it is, has no purpose any more.
    Turns.withdraw(call, execution)
  end
  if Base.is_over(ended) or ended and string.find(ended, ' ' .. attempt .. ' ', 1, true) then
    return { 'ENDED', string.match(ended, '^%* (%a+)$') }
  end
  local left, text, holds = Claim.other_attempt(me)
  if left and holds and asked and asked.message then
    Claim.leave_other_places(me, locks)
    Claim.park(me, { locks = locks, limits = limits }, true)
    return parked(locks[1])
  end
  if left then
    return { 'ATTEMPT', left, text }
  end
  local at = Claim.parked_by_this_attempt(me)
  return at and (asked and asked.message and parked_before(at) or busy(at.index_of_claim))
end

local function answer()
  local refused = refusal()
  if refused then
    return refused
  end
  -- Only now: a refused attempt must not leave a place behind.
  for i, lock in ipairs(locks) do
    Holds.claim_kept(lock, execution, limits[i])
  end
  Claim.take_over_places(me)
  local ahead = {}
  for i, lock in ipairs(locks) do
    ahead[i] = lock.queued and Turns.promote(call, lock, execution)
  end
  -- Only now: what the queues let in can hold any of these locks, or be this execution.
  local missing, blocked = sort_out(ahead)
  local path, line
  if blocked and stuck and asked then
    path, line = Deadlock.path(call, execution, missing, stuck)
  end
  if line then
    -- Without this execution those behind it would wait for others, and these for them, all the same.
    Parked.ask_again(call, line)
  elseif path then
    Claim.leave_other_places(me, {})
    return { 'DEADLOCK', unpack(path) }
  end
  -- Pass those ahead who wait for a hold of this execution's own call stack, or for a permit that it may
  -- join: neither can move before this one does. In a line nobody is passed: what those ahead wait for, this
  -- execution would wait for next.
  local looks = blocked and not path and not Holds.is_line(locks[1]) and (stuck or next(missing.joins))
  for i, lock in ipairs(looks and locks or {}) do
    if ahead[i] and Deadlock.is_behind_itself(call, execution, me, lock, limits[i], stuck, missing.joins) then
      ahead[i], me.passes = false, true
    end
  end
  if me.passes then
    missing, blocked = sort_out(ahead)
  end
  if blocked and not asked then
    return busy(blocked)
  end
  if blocked and asked.message then
    return park(missing, blocked)
  end
  Claim.leave_other_places(me, blocked and missing.locks or {})
  if blocked then
    Claim.wait(me, missing)
    local lock = locks[blocked]
    local rank = redis.call('ZRANK', lock.queue, execution)
    return { ok = string.format('WAIT %d %.0f', rank, Holds.next_lapse(lock)) }
  end
  return take(missing)
end

local reply = answer()
-- Only now: what this execution has left must be free to others, and what it has acquired must not.
if #call.to_promote > 0 then
  Turns.promote_others(call)
end
return reply
