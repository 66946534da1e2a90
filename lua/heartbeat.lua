-- heartbeat: Keep the places of waiters, and find the grants whose message was missed.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2..] lock: hash, the holds of a lock; one key per waiter
-- ARGV[1..] execution attempt wait lease: id, id, ms, ms; such words per lock key
-- Reply {{HELD, fence}, …}: the execution has the lock, for a whole lease from now
-- Reply {{WAIT, rank, ms}, …}: still queued; look again after ms, when the next lease ends
-- Reply {{LOST}, …}: no hold and no place: the lease ran out, or the key is foreign
-- Reply {…, failed}: what failed for one of them, if anything
-- Keeps: a lost wake-up delays by one heartbeat; waiters find a dead holder; a foreign key hurts its own lock alone
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/lines, lib/turns

local meta, keys, claims = KEYS[1], KEYS, ARGV
local call = Base.begin(meta)
Base.write_without_memory(call.prefix)

local function keep_place(beat)
  local lock = Holds.open(call, beat.key)
  local waiter = Queue.waiter(lock, beat.execution)
  beat.lock = lock
  -- A parked execution has no process: a late heartbeat must not acquire the lock for nobody.
  if waiter and not waiter.parked and waiter.attempt == beat.attempt and waiter.expiry > call.now then
    waiter.expiry, waiter.life = call.now + beat.wait, beat.wait
    Queue.write(call, lock, beat.execution, waiter)
    if waiter.stuck then
      Deadlock.keep(call, waiter)
    end
    beat.waiter = waiter
  end
end

local function promote(beat)
  local lock, execution, waiter = beat.lock, beat.execution, beat.waiter
  if waiter and not Holds.has(lock, execution) then
    Turns.promote(call, lock, execution)
    -- Turns.join let in only waiters that could be notified, and only beside a holder that also re-enters by
    -- owner.
    if not Holds.has(lock, execution) and (waiter.by_owner or Holds.kept(lock, execution)) then
      Turns.serve_one(call, lock, execution, execution)
    end
  end
end

local function answer(beat)
  local lock, execution = beat.lock, beat.execution
  local hold = lock.holds[execution]
  if hold and hold.attempt == beat.attempt then
    Holds.extend(lock, execution, call.now + beat.lease)
    Base.promise_again(meta)
    beat.reply = { ok = 'HELD ' .. hold.fence }
  elseif beat.waiter then
    local rank = redis.call('ZRANK', lock.queue, execution)
    beat.reply = { ok = string.format('WAIT %d %.0f', rank, Holds.next_lapse(lock)) }
  end
end

local beats, reply = {}, {}
for i = 2, #keys do
  local execution, attempt, wait, lease = string.match(claims[i - 1], '^(%S+) (%S+) (%d+) (%d+)$')
  beats[i - 1] = {
    key = keys[i],
    execution = execution,
    attempt = attempt,
    wait = tonumber(wait),
    lease = tonumber(lease),
    reply = { ok = 'LOST' },
  }
end
-- Keep all places before any head gets in: else a head of this very call could look dead. Reply last: an
-- execution that wants several locks gets all of them at the last.
for _, step in ipairs({ keep_place, promote, answer }) do
  for _, beat in ipairs(beats) do
    if not beat.failed then
      local fine, failure = Base.safely(call, beat.key, step, beat)
      -- Of any other error than a foreign key's nobody knows what it leaves of the place.
      beat.failed = not fine
      beat.reply = fine and beat.reply or { ok = Base.is_foreign(failure) and 'LOST' or 'WAIT 0 0' }
    end
  end
end
for i, beat in ipairs(beats) do
  reply[i] = beat.reply
end
reply[#beats + 1] = call.failed
return reply
