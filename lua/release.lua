-- release: Give back a run's holds, or its places in the queues, and let the next ones in.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2] tombstone: string, how the run ended
-- KEYS[3..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1] run: id, the execution of one message
-- ARGV[2] nonce: id, the attempt that took the locks
-- ARGV[3] ended: `run`, `attempt` or empty, what a tombstone shall say has ended
-- ARGV[4] remember: ms, life of the tombstone
-- Reply {RELEASED, count}: so many holds and places were given back
-- Reply {GONE}: the attempt had none: released before, or lost
-- Keeps: only the attempt that took a lock gives it back; sent twice it acts once; the next ones get in

local meta, tombstone, first = KEYS[1], KEYS[2], KEYS[3]
local run, nonce = ARGV[1], ARGV[2]
local ended, remember = ARGV[3], tonumber(ARGV[4])
local keys = KEYS

-- As in acquire: one lock that nobody waits for. Whether its lease had run out just now, unseen by
-- anybody, is for the holder's own clock to say.
local function give_back_alone()
  local prefix = string.sub(meta, 1, -5)
  local queue = prefix .. 'q:' .. string.sub(first, string.len(prefix) + 3)
  local record = redis.call('HGET', first, run)
  local mine = record and string.match(record, '^%d+ %d+ (%S+) ') == nonce
  if not mine or redis.call('EXISTS', queue) ~= 0 then
    return false
  end
  redis.call('HDEL', first, run, '@' .. run)
  return true
end

if #keys == 3 and ended ~= 'attempt' and give_back_alone() then
  if ended == 'run' then
    redis.call('SET', tombstone, '*', 'PX', remember)
  end
  return { 'RELEASED', 1 }
end

-- Uses: lib/call, lib/holds, lib/queue

local locks = {}
local call = Call.begin(meta)
for i = 3, #keys do
  locks[i - 2] = Holds.open(call, keys[i])
end

local function give_back(lock)
  local hold = lock.holds[run]
  if hold and hold.nonce == nonce then
    Holds.drop(lock, run)
    return 1
  end
  local waiter = redis.call('EXISTS', lock.queue) == 1 and Queue.waiter(lock, run)
  if waiter and waiter.nonce == nonce then
    Queue.leave(call, lock, run, waiter)
    return 1
  end
  return 0
end

-- An attempt adds itself to those that have ended: a copy of any of them may be on its way. A run
-- that has ended stays so.
local function remember_end()
  local before = redis.call('GET', tombstone)
  if ended == 'run' then
    redis.call('SET', tombstone, '*', 'PX', remember)
  elseif ended == 'attempt' and before ~= '*' then
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
    Queue.promote(call, lock)
  end
end

if ended ~= '' then
  remember_end()
end
if released > 0 then
  return { 'RELEASED', released }
end
return { 'GONE' }
