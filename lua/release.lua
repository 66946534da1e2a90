-- release: Give back a run's holds, or its places in the queues, and let the next ones in.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2] tombstone: string, how the run ended
-- KEYS[3..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1] run: id, the execution of one message
-- ARGV[2] nonce: id, the attempt that took the locks
-- ARGV[3] ended: `run`, `attempt` or empty, what a tombstone shall say has ended; `killed` is an attempt
-- ARGV[4] remember: ms, life of the tombstone
-- ARGV[5] home: text, the broker that the caller can send parked messages to; empty sends none
-- ARGV[6] heir: ids with spaces between, the runs that the holds are kept for; empty gives them back
-- ARGV[7] keep: ms, for how long they are kept for each
-- Reply {RELEASED, count, run, name, message, …}: so many holds and places were given back; messages to send
-- Reply {GONE, run, name, message, …}: the attempt had none: released before, or lost; messages to send
-- Keeps: only the attempt that took a lock gives it back; a kept hold stays in its entry; sent twice it acts once; the next ones get in
-- Uses: lib/publish

local meta, tombstone, first = KEYS[1], KEYS[2], KEYS[3]
local run, nonce = ARGV[1], ARGV[2]
local ended, remember = ARGV[3], tonumber(ARGV[4])
local home, heir, keep = ARGV[5], ARGV[6], tonumber(ARGV[7])
local keys = KEYS

local prefix = string.sub(meta, 1, -5)
local name = string.sub(first, string.len(prefix) + 3)
local queue = prefix .. 'q:' .. name

-- As in acquire: one lock. Whether its lease had run out just now, unseen by anybody, is for the
-- holder's own clock to say.
local alone = #keys == 3 and heir == '' and (ended == '' or ended == 'run')
local record = alone and redis.call('HGET', first, run)
local is_mine = record and string.match(record, '^%d+ %d+ (%S+) ') == nonce
if is_mine and redis.call('EXISTS', queue) == 0 then
  redis.call('HDEL', first, run, '@' .. run)
  if ended == 'run' then
    redis.call('SET', tombstone, '*', 'PX', remember)
  end
  return { 'RELEASED', 1 }
end

-- Uses: lib/base

-- As in acquire, where nobody waits but simply: the first in line gets what this run has alone.
local function hand_over()
  local waiters = prefix .. 'w:' .. name
  local head = redis.call('ZRANGE', queue, 0, 0)[1]
  local last = redis.call('ZREVRANGE', queue, 0, 0)[1]
  local known = redis.call('HMGET', waiters, head, last, run)
  local simple = Base.is_simple(known[1]) and Base.is_simple(known[2]) and not known[3]
  if not simple or redis.call('HLEN', first) ~= 2 then
    return false
  end
  local micros = Base.micros()
  local now = math.floor(micros / 1000)
  local waiter = cjson.decode(known[1])
  local left = waiter.expiry - now
  if left <= 0 or left > waiter.life then
    return false
  end
  local fence = Base.next_fence(meta, micros)
  local message = table.concat({ 'granted', head, waiter.nonce, fence }, ' ')
  if publish(prefix .. 'i:' .. waiter.channel, message) == 0 then
    return false
  end
  redis.call('ZREM', queue, head)
  redis.call('HDEL', waiters, head)
  local hold = { expiry = waiter.expiry, fence = fence, nonce = waiter.nonce, owner = waiter.owner }
  redis.call('HSET', first, head, Base.record(hold, now), '@' .. head, waiter.inbox .. ' ' .. waiter.who)
  redis.call('HDEL', first, run, '@' .. run)
  redis.call('PEXPIRE', first, left + Base.GRACE)
  return true
end

if is_mine and hand_over() then
  if ended == 'run' then
    redis.call('SET', tombstone, '*', 'PX', remember)
  end
  return { 'RELEASED', 1 }
end

-- Uses: lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/turns

local locks = {}
local call = Call.begin(meta)
call.home, call.by = home, run .. ' ' .. nonce
for i = 3, #keys do
  locks[i - 2] = Holds.open(call, keys[i])
end

-- An heir may have been quicker: it has joined the entry by its lineage, or is over, or was killed.
-- A run that leaves it to itself lives, whatever became of an attempt before this one.
local function leave_to_heirs(lock, hold, who)
  for each in string.gmatch(heir, '%S+') do
    local how = redis.call('GET', call.prefix .. 'd:' .. each)
    if not lock.holds[each] and (not how or each == run and how ~= '*') then
      local kept = { expiry = call.now + keep, fence = hold.fence, nonce = Holds.KEPT, owner = hold.owner }
      Holds.write(lock, each, kept, who)
    end
  end
end

local function give_back(lock)
  local hold = lock.holds[run]
  local held = hold and hold.nonce == nonce
  if held then
    local who = heir ~= '' and redis.call('HGET', lock.key, '@' .. run) or ''
    Holds.drop(lock, run)
    leave_to_heirs(lock, hold, who)
  end
  local waiter = redis.call('EXISTS', lock.queue) == 1 and Queue.waiter(lock, run)
  -- A message outlives the attempt that it was sent on for, but not the one that parked it and takes
  -- that back, as it heard no answer; one that was killed then does not. With the run a copy behind
  -- it ends as well.
  local parked_it = waiter and waiter.parked and not waiter.arrived and ended ~= 'killed'
  local mine = waiter and waiter.nonce == nonce and (not waiter.parked or parked_it)
  local leaves = mine or waiter and waiter.parked and ended == 'run'
  if leaves then
    Queue.leave(call, lock, run, waiter)
  end
  return (held or leaves) and 1 or 0
end

-- An attempt adds itself to those that have ended: a copy of any of them may be on its way. A run
-- that has ended stays so.
local function remember_end()
  local before = redis.call('GET', tombstone)
  if ended == 'run' then
    redis.call('SET', tombstone, '*', 'PX', remember)
  elseif ended ~= '' and before ~= '*' then
    redis.call('SET', tombstone, (before or ' ') .. nonce .. ' ', 'PX', remember)
  end
end

local released = 0
for _, lock in ipairs(locks) do
  released = released + give_back(lock)
end

-- After all of them: a run that waits for several of these locks must find every one given back.
for _, lock in ipairs(locks) do
  if redis.call('EXISTS', lock.queue) == 1 then
    Turns.promote(call, lock)
    for each in string.gmatch(heir, '%S+') do
      Turns.inherit(call, lock, each)
    end
  end
end

if ended ~= '' then
  remember_end()
end
if released > 0 then
  return { 'RELEASED', released, unpack(call.messages) }
end
return { 'GONE', unpack(call.messages) }
