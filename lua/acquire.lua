-- acquire: Take one or more locks for a run, all or none, or queue for them.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2] tombstone: string, how the run ended, if it did
-- KEYS[3..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1] run: id, the execution of one message
-- ARGV[2] nonce: id, this attempt to execute the run
-- ARGV[3] owner: id, who may re-enter
-- ARGV[4] lease: ms, life of the hold without renewal
-- ARGV[5] wait: ms, life of a place in the queue without a heartbeat; 0 does not queue
-- ARGV[6] inbox: id, the process that hears of grants
-- ARGV[7] who: text, the holder for people
-- ARGV[8] by_owner: 1 or 0, whether every run of the owner may re-enter
-- ARGV[9] lineage: ids with spaces between, the holds of the run's ancestors
-- ARGV[10..] limit: count, entries at the same time; one per lock
-- Reply {HELD, fence, reentered, …}: the run has all locks; a pair per lock
-- Reply {WAIT, rank, ms}: queued at this rank; look again after ms, when the next lease ends
-- Reply {BUSY, index, ms, fence, owner, who, waiting}: the lock with this index is not to be had; its holder
-- Reply {DUPLICATE, ms, who}: another attempt of the same run lives, for ms more if it is not renewed
-- Reply {ENDED}: the run, or this attempt, has ended already
-- Keeps: at most `limit` live entries; re-entry never waits; nobody overtakes; sent twice it acts once

local meta, tombstone, first = KEYS[1], KEYS[2], KEYS[3]
local run, nonce, owner = ARGV[1], ARGV[2], ARGV[3]
local lease, wait = tonumber(ARGV[4]), tonumber(ARGV[5])
local inbox, who = ARGV[6], ARGV[7]
local by_owner, lineage = ARGV[8] == '1', ARGV[9]
local keys, options = KEYS, ARGV

-- One lock that nobody has and nobody waits for, and a run that is not over: nearly every call, so
-- it is written out. It takes a third of the time of what follows, and comes to the same.
local function take_free()
  local prefix = string.sub(meta, 1, -5)
  local queue = prefix .. 'q:' .. string.sub(first, string.len(prefix) + 3)
  if redis.call('EXISTS', tombstone, first, queue) ~= 0 then
    return nil
  end
  local time = redis.call('TIME')
  local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
  local last = tonumber(redis.call('HGET', meta, 'fence') or 0)
  local fence = string.format('%.0f', math.max(last + 1, micros))
  local expiry = string.format('%.0f', math.floor(micros / 1000) + lease)
  redis.call('HSET', meta, 'fence', fence)
  redis.call('HSET', first, run, expiry .. ' ' .. fence .. ' ' .. nonce .. ' ' .. owner,
    '@' .. run, inbox .. ' ' .. who)
  redis.call('PEXPIRE', first, lease + 60000)
  return { 'HELD', fence, 0 }
end

local taken = #keys == 3 and take_free()
if taken then
  return taken
end

-- Uses: lib/call, lib/holds, lib/queue

local call = Call.begin(meta)
local locks, limits = {}, {}
for i = 3, #keys do
  locks[i - 2] = Holds.open(call, keys[i])
  limits[i - 2] = tonumber(options[i + 7])
end

local function place(for_limits, names)
  return {
    expiry = call.now + wait,
    nonce = nonce,
    owner = owner,
    inbox = inbox,
    who = who,
    by_owner = by_owner,
    limits = for_limits,
    names = names,
  }
end

-- Another attempt of this run that lives, holding or waiting: the reply that says so.
local function duplicate_of(lock)
  local mine = lock.holds[run]
  if mine and mine.nonce ~= nonce then
    local text = redis.call('HGET', lock.key, '@' .. run) or ''
    return { 'DUPLICATE', mine.expiry - call.now, text }
  end
  local waiter = lock.queued and Queue.waiter(lock, run)
  if waiter and waiter.nonce ~= nonce and waiter.expiry > call.now then
    return { 'DUPLICATE', waiter.expiry - call.now, waiter.inbox .. ' ' .. waiter.who }
  end
  return nil
end

-- The place of an attempt that died goes on to this one, before the queue is cleared of the dead.
local function take_over_place(lock)
  local waiter = wait > 0 and lock.queued and Queue.waiter(lock, run)
  if waiter and waiter.expiry <= call.now then
    for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
      Queue.write(call, each, run, place(waiter.limits, waiter.names))
    end
  end
end

-- The fence of the newest entry that lets this run in without waiting. Lineage that is forged or out
-- of date admits nobody: it must name a live hold of the same owner.
local function entry_of(lock)
  local ancestors = {}
  for ancestor in string.gmatch(lineage, '%S+') do
    ancestors[ancestor] = lock.holds[ancestor]
  end
  return Holds.entry_of(by_owner and lock.holds or ancestors, owner)
end

local function take(lock, fence)
  local hold = { expiry = call.now + lease, fence = fence, nonce = nonce, owner = owner }
  Holds.write(lock, run, hold, inbox .. ' ' .. who)
end

local function busy(index)
  local lock = locks[index]
  local waiting = redis.call('ZCARD', lock.queue)
  local hold, holder = Holds.oldest(lock)
  if not hold then
    return { 'BUSY', index, 0, '', '', '', waiting }
  end
  local text = redis.call('HGET', lock.key, '@' .. holder) or ''
  return { 'BUSY', index, hold.expiry - call.now, hold.fence, hold.owner, text, waiting }
end

local function names_of(wanted)
  local names = {}
  for i, lock in ipairs(wanted) do
    names[i] = lock.name
  end
  return names
end

-- A place is for one set of locks. Where the run now has one of them, or wants another set than
-- before, the old place goes: it would be granted beside the new one, or tickets would differ.
local function leave_other_places(wanted)
  local names = table.concat(names_of(wanted), '\0')
  for _, lock in ipairs(locks) do
    local waiter = lock.queued and Queue.waiter(lock, run)
    if waiter and table.concat(waiter.names or { lock.name }, '\0') ~= names then
      Queue.leave(call, lock, run, waiter)
    end
  end
end

local function queue_for(wanted, index)
  local names = #wanted.locks > 1 and names_of(wanted.locks) or nil
  Queue.enter(call, wanted.locks, run, place(wanted.limits, names))
  local lock = locks[index]
  return { 'WAIT', redis.call('ZRANK', lock.queue, run), Holds.next_lapse(call, lock) }
end

-- Sorts the locks: what the run may join now, and what it wants as a new entry; the index of the
-- first that is not to be had.
local function sort_out()
  local ahead = {}
  for i, lock in ipairs(locks) do
    ahead[i] = lock.queued and Queue.promote(call, lock, run)
  end
  -- Only now: whoever was let in by one of the queues may have taken, or be, any of these.
  local entered, wanted, blocked = {}, { locks = {}, limits = {} }, nil
  for i, lock in ipairs(locks) do
    entered[i] = not lock.holds[run] and entry_of(lock) or nil
    if not lock.holds[run] and not entered[i] then
      table.insert(wanted.locks, lock)
      table.insert(wanted.limits, limits[i])
      if ahead[i] or lock.entries >= limits[i] then
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
  local fence = Call.next_fence(call)
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
  if ended == '*' or ended and string.find(ended, ' ' .. nonce .. ' ', 1, true) then
    return { 'ENDED' }
  end
  for _, lock in ipairs(locks) do
    lock.queued = redis.call('EXISTS', lock.queue) == 1
    local duplicate = duplicate_of(lock)
    if duplicate then
      return duplicate
    end
  end
  -- After all of them: an attempt that is turned away must not leave a place behind.
  for _, lock in ipairs(locks) do
    take_over_place(lock)
  end
  return nil
end

local refused = refusal()
if refused then
  return refused
end
local entered, wanted, blocked = sort_out()
if blocked and wait == 0 then
  return busy(blocked)
end
leave_other_places(blocked and wanted.locks or {})
for i, fence in pairs(entered) do
  take(locks[i], fence)
end
if blocked then
  return queue_for(wanted, blocked)
end
enter_anew(wanted.locks)
return held()
