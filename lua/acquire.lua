-- acquire: Take one or more locks for a run, all or none, or queue for them.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2] tombstone: string, how the run ended, if it did
-- KEYS[3..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1] run: id, the execution of one message
-- ARGV[2] nonce: id, this attempt to execute the run
-- ARGV[3] owner: id, who may re-enter
-- ARGV[4] lease: ms, life of the hold without renewal
-- ARGV[5] place: text, how to queue as JSON: `wait` and `channel`, or `message` and what belongs to it; empty does not
-- ARGV[6] inbox: id, the process that hears of losses
-- ARGV[7] who: text, the holder for people
-- ARGV[8] by_owner: 1 or 0, whether every run of the owner may re-enter
-- ARGV[9] lineage: ids with spaces between, the holds of the run's ancestors
-- ARGV[10..] limit: count, entries at the same time; one per lock
-- Reply {HELD, fence, reentered, …}: the run has all locks; a pair per lock
-- Reply {WAIT, rank, ms}: queued at this rank; look again after ms, when the next lease ends
-- Reply {PARKED, rank, run, name, message, …}: the message is in the queue at this rank; messages to send
-- Reply {FULL, index, count}: so many are parked at the lock with this index already
-- Reply {BUSY, index, ms, fence, owner, who, waiting, parked}: a lock that is not to be had; is the run parked?
-- Reply {DEADLOCK, lock, who, …}: waiting would never end: who has the lock waits for the next one, and so on
-- Reply {DUPLICATE, ms, who}: another attempt of the same run lives, for ms more if it is not renewed
-- Reply {ENDED}: the run, or this attempt, has ended already
-- Keeps: at most `limit` live entries; re-entry never waits; nobody overtakes; sent twice it acts once
-- Uses: lib/publish

local meta, tombstone, first = KEYS[1], KEYS[2], KEYS[3]
local run, nonce, owner = ARGV[1], ARGV[2], ARGV[3]
local lease, place = tonumber(ARGV[4]), ARGV[5]
local inbox, who = ARGV[6], ARGV[7]
local by_owner, lineage = ARGV[8] == '1', ARGV[9]
local keys, options = KEYS, ARGV

local prefix = string.sub(meta, 1, -5)
local queue = prefix .. 'q:' .. string.sub(first, string.len(prefix) + 3)
local is_free = #keys == 3 and redis.call('EXISTS', tombstone, first, queue) == 0

-- One lock that nobody has and nobody waits for, and a run that is not over: nearly every call, so
-- it is written out. It takes a third of the time of what follows, as to define functions is most of
-- that, and comes to the same: what is known of a fence, and of a record's end, is in lib/base.
if is_free then
  local time = redis.call('TIME')
  local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('HGET', meta, 'fence') or 0)
  local fence = string.format('%.0f', math.max(last + 1, micros))
  redis.call('HSET', meta, 'fence', fence)
  local _, exponent = math.frexp(lease)
  local expiry, bound = math.floor(micros / 1000) + lease, string.char(97 + math.min(exponent, 25))
  local record = string.format('%.0f %s %s %s %s', expiry, fence, nonce, owner, bound)
  redis.call('HSET', first, run, record, '@' .. run, inbox .. ' ' .. who)
  redis.call('PEXPIRE', first, lease + 60000)
  return { 'HELD', fence, 0 }
end

-- Uses: lib/base

-- Nearly every wait, written out as well: for one lock that another run has alone, behind nobody but
-- others of this kind. `simple` at a place says that it and all ahead of it are (see lib/queue): no
-- more than one of them is let in at a time, and none by an entry that it could join.
local function wait_simply()
  local wait, channel = string.match(place, '^{"wait": (%d+), "channel": "([%w_-]+)"}$')
  if not wait or by_owner or lineage ~= '' or options[10] ~= '1' then
    return nil
  end
  if redis.call('EXISTS', tombstone, prefix .. 'parked') ~= 0 then
    return nil
  end
  wait = tonumber(wait)
  local micros = Base.micros()
  local now = math.floor(micros / 1000)
  local holds = redis.call('HGETALL', first)
  local expiry, held_by, bound = string.match(holds[2] or '', '^(%d+) %d+ (%S+) %S+ (%l)$')
  local left = tonumber(expiry or 0) - now
  -- What is kept for a run that waits already may be had by that one now.
  local alone = #holds == 4 and holds[3] == '@' .. holds[1] and holds[1] ~= run and held_by ~= '-'
  if not alone or left <= 0 or left > Base.longest(bound) then
    return nil
  end
  local waiters = prefix .. 'w:' .. string.sub(first, string.len(prefix) + 3)
  local last = redis.call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')
  local head = redis.call('ZRANGE', queue, 0, 0)[1]
  local known = redis.call('HMGET', waiters, run, last[1] or run, head or run)
  if known[1] or head and not (Base.is_simple(known[2]) and Base.is_alive(known[3], now)) then
    return nil
  end
  local ticket = math.max(micros, tonumber(last[2] or 0) + 1)
  redis.call('ZADD', queue, string.format('%.0f', ticket), run)
  redis.call('HSET', waiters, run, cjson.encode({
    simple = true,
    expiry = now + wait,
    life = wait,
    nonce = nonce,
    owner = owner,
    channel = channel,
    inbox = inbox,
    who = who,
    by_owner = false,
    limits = { 1 },
  }))
  Base.outlive(queue, waiters, wait)
  return { 'WAIT', redis.call('ZCARD', queue) - 1, left }
end

local place_taken = #keys == 3 and wait_simply()
if place_taken then
  return place_taken
end

-- Uses: lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/turns, lib/claim

local call = Call.begin(meta)
local locks, limits = {}, {}
for i = 3, #keys do
  locks[i - 2] = Holds.open(call, keys[i])
  limits[i - 2] = tonumber(options[i + 7])
  locks[i - 2].index = i - 2
  locks[i - 2].queued = redis.call('EXISTS', locks[i - 2].queue) == 1
end

-- How to queue, if at all: in a process that has heartbeats, or as a message (see lib/parked).
local asked = place ~= '' and cjson.decode(place) or nil
call.by = run .. ' ' .. nonce

local me = {
  call = call,
  run = run,
  nonce = nonce,
  owner = owner,
  lease = lease,
  inbox = inbox,
  who = who,
  by_owner = by_owner,
  lineage = lineage,
  locks = locks,
  limits = limits,
  asked = asked,
}

local function take(lock, fence)
  local hold = { expiry = call.now + lease, fence = fence, nonce = nonce, owner = owner }
  Holds.write(lock, run, hold, inbox .. ' ' .. who)
end

local function busy(index)
  local lock = locks[index]
  local waiting = redis.call('ZCARD', lock.queue)
  local parked = redis.call('HEXISTS', lock.messages, run)
  local hold, holder = Holds.oldest(lock)
  if not hold then
    return { 'BUSY', index, 0, '', '', '', waiting, parked }
  end
  local text = redis.call('HGET', lock.key, '@' .. holder) or ''
  return { 'BUSY', index, hold.expiry - call.now, hold.fence, hold.owner, text, waiting, parked }
end

local function parked_at(lock)
  return { 'PARKED', redis.call('ZRANK', lock.queue, run), unpack(call.messages) }
end

-- A run that is parked has no process, so it does not join an entry before all locks are to be had.
local function park(wanted, index)
  local full, parked = Claim.full(me, wanted.locks)
  Claim.leave_other_places(me, full and {} or wanted.locks)
  if full then
    return { 'FULL', full.index, parked }
  end
  Claim.park(me, wanted)
  return parked_at(locks[index])
end

-- Sorts the locks: what the run may join now, and what it wants as a new entry; the index of the
-- first that is not to be had.
local function sort_out()
  local ahead = {}
  for i, lock in ipairs(locks) do
    ahead[i] = lock.queued and Turns.promote(call, lock, run)
  end
  -- Only now: whoever was let in by one of the queues may have taken, or be, any of these.
  local entered, wanted, blocked = {}, { locks = {}, limits = {} }, nil
  for i, lock in ipairs(locks) do
    local mine = lock.holds[run] and not Holds.kept(lock, run)
    entered[i] = not mine and Queue.entry_of(lock, run, me) or nil
    if not mine and not entered[i] then
      table.insert(wanted.locks, lock)
      table.insert(wanted.limits, limits[i])
      if ahead[i] or lock.entries + (lock.promised or 0) >= limits[i] then
        blocked = blocked or i
      end
    end
  end
  return entered, wanted, blocked
end

local function enter_anew(wanted)
  if #wanted == 0 then
    return
  end
  local fence = Base.next_fence(meta, call.micros)
  for _, lock in ipairs(wanted) do
    take(lock, fence)
  end
end

local function held()
  local reply = { 'HELD' }
  for _, lock in ipairs(locks) do
    -- A grant out of the queue lives for what was left of the place; this reply promises the lease.
    Holds.extend(lock, run, call.now + lease)
    local fence = lock.holds[run].fence
    table.insert(reply, fence)
    -- Not alone in its entry: true for a repeat of the command as well.
    table.insert(reply, lock.fences[fence] > 1 and 1 or 0)
  end
  return reply
end

-- The reply to a run, or an attempt, that is not to go on.
local function refusal()
  -- A command may arrive after its own release, when the client sent it again on a new connection.
  local ended = redis.call('GET', tombstone)
  if ended == '*' then
    -- Where the run is over, so is its message, wherever that may be parked.
    Turns.withdraw(call, run)
  end
  if ended == '*' or ended and string.find(ended, ' ' .. nonce .. ' ', 1, true) then
    return { 'ENDED' }
  end
  local left, text, is_in = Claim.other_attempt(me)
  if left and is_in and asked and asked.message then
    Claim.leave_other_places(me, locks)
    Claim.park(me, { locks = locks, limits = limits }, true)
    return parked_at(locks[1])
  end
  return left and { 'DUPLICATE', left, text }
end

local refused = refusal()
if refused then
  return refused
end
-- Only now: an attempt that is turned away must not leave a place behind.
Claim.take_over_places(me)
local entered, wanted, blocked = sort_out()
if blocked and not asked then
  return busy(blocked)
end
local path = blocked and Deadlock.path(call, wanted.locks, wanted.limits, asked.stuck)
if path then
  Claim.leave_other_places(me, {})
  return { 'DEADLOCK', unpack(path) }
end
if blocked and asked.message then
  return park(wanted, blocked)
end
Claim.leave_other_places(me, blocked and wanted.locks or {})
for i, fence in pairs(entered) do
  take(locks[i], fence)
end
if blocked then
  Claim.wait(me, wanted)
  return { 'WAIT', redis.call('ZRANK', locks[blocked].queue, run), Holds.next_lapse(call, locks[blocked]) }
end
enter_anew(wanted.locks)
return held()
