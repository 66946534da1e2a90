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
  if mine then
    local text = redis.call('HGET', lock.key, '@' .. run) or ''
    return mine.nonce ~= nonce and { 'DUPLICATE', mine.expiry - call.now, text } or nil
  end
  local waiter = lock.queued and Queue.waiter(lock, run)
  if not waiter or waiter.nonce == nonce then
    return nil
  end
  if waiter.expiry > call.now then
    return { 'DUPLICATE', waiter.expiry - call.now, waiter.inbox .. ' ' .. waiter.who }
  end
  -- The place of an attempt that died goes on to this one, before the queue is cleared of the dead.
  if wait > 0 and #locks == 1 then
    Queue.write(lock, run, place(limits))
  end
  return nil
end

-- The fence of the newest entry that lets this run in without waiting.
local function entry_of(lock)
  local fence
  local function offer(hold)
    if hold and hold.owner == owner and (not fence or tonumber(hold.fence) > tonumber(fence)) then
      fence = hold.fence
    end
  end
  -- Lineage that is forged or out of date admits nobody: it must name a live hold of the same owner.
  for ancestor in string.gmatch(lineage, '%S+') do
    offer(lock.holds[ancestor])
  end
  if by_owner then
    for _, hold in pairs(lock.holds) do
      offer(hold)
    end
  end
  return fence
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

local function queue_for(wanted, index)
  local names
  if #wanted.locks > 1 then
    names = {}
    for i, lock in ipairs(wanted.locks) do
      names[i] = lock.name
    end
  end
  Queue.enter(call, wanted.locks, run, place(wanted.limits, names))
  local lock = locks[index]
  return { 'WAIT', redis.call('ZRANK', lock.queue, run), Holds.next_lapse(call, lock) }
end

-- Sorts the locks: what the run has or may enter now, and what it wants as a new entry; the index
-- of the first that is not to be had.
local function sort_out()
  local entered, wanted, blocked = {}, { locks = {}, limits = {} }, nil
  for i, lock in ipairs(locks) do
    local ahead = lock.queued and Queue.promote(call, lock, run)
    entered[i] = not lock.holds[run] and entry_of(lock) or nil
    if not lock.holds[run] and not entered[i] then
      table.insert(wanted.locks, lock)
      table.insert(wanted.limits, limits[i])
      if ahead or lock.entries >= limits[i] then
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
  Call.spend_fence(call, fence)
  for _, lock in ipairs(wanted) do
    take(lock, fence)
    if by_owner and lock.queued then
      Queue.join(call, lock, owner, fence)
    end
  end
end

local function held()
  local reply = { 'HELD' }
  for _, lock in ipairs(locks) do
    local fence = lock.holds[run].fence
    table.insert(reply, fence)
    -- Not alone in its entry: true for a repeat of the command as well.
    table.insert(reply, lock.fences[fence] > 1 and 1 or 0)
  end
  return reply
end

-- A command may arrive after its own release, when the client sent it again on a new connection.
local ended = redis.call('GET', tombstone)
if ended == '*' or ended == nonce then
  return { 'ENDED' }
end
for _, lock in ipairs(locks) do
  lock.queued = redis.call('EXISTS', lock.queue) == 1
  local duplicate = duplicate_of(lock)
  if duplicate then
    return duplicate
  end
end

local entered, wanted, blocked = sort_out()
if blocked and wait == 0 then
  return busy(blocked)
end
for i, fence in pairs(entered) do
  take(locks[i], fence)
end
if blocked then
  return queue_for(wanted, blocked)
end
enter_anew(wanted.locks)
return held()
