-- heartbeat: Keep the places of waiting runs, and find the grants whose message was missed.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2..] lock: hash, the holds of a lock; one key per waiter
-- ARGV[1..] run, nonce, wait, lease: id, id, ms, ms; four per lock key
-- Reply {{HELD, fence}, …}: the run has the lock, for a whole lease from now
-- Reply {{WAIT, rank, ms}, …}: still queued; look again after ms, when the next lease ends
-- Reply {{LOST}, …}: no hold and no place: the lease ran out
-- Keeps: a lost wake-up delays by one heartbeat; a dead holder is found by whoever waits
-- Uses: lib/publish, lib/base, lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/turns

local meta, keys, claims = KEYS[1], KEYS, ARGV
local call = Call.begin(meta)

local function keep_place(lock, run, nonce, wait)
  local waiter = Queue.waiter(lock, run)
  -- What is parked has no process; a beat that comes late must not get the lock for nobody.
  if not waiter or waiter.parked or waiter.nonce ~= nonce or waiter.expiry <= call.now then
    return nil
  end
  waiter.expiry, waiter.life = call.now + wait, wait
  Queue.write(call, lock, run, waiter)
  return waiter
end

-- First all places are kept, then the heads get in: else a head of this very call would look dead.
local beats = {}
for i = 2, #keys do
  local lock = Holds.open(call, keys[i])
  local run, nonce = claims[4 * i - 7], claims[4 * i - 6]
  local wait, lease = tonumber(claims[4 * i - 5]), tonumber(claims[4 * i - 4])
  local waiter = keep_place(lock, run, nonce, wait)
  beats[i - 1] = { lock = lock, run = run, nonce = nonce, lease = lease, waiter = waiter }
end

for _, beat in ipairs(beats) do
  if beat.waiter and (not beat.lock.holds[beat.run] or Holds.kept(beat.lock, beat.run)) then
    Turns.promote(call, beat.lock, beat.run)
    if not beat.lock.holds[beat.run] or Holds.kept(beat.lock, beat.run) then
      Turns.rejoin(call, beat.lock, beat.run, beat.waiter)
    end
  end
end

-- Last the replies: a run that wants several locks may have got the first with the last.
local reply = {}
for i, beat in ipairs(beats) do
  local lock, run = beat.lock, beat.run
  local hold = lock.holds[run]
  if hold and hold.nonce == beat.nonce then
    Holds.extend(lock, run, call.now + beat.lease)
    reply[i] = { 'HELD', hold.fence }
  elseif beat.waiter then
    reply[i] = { 'WAIT', redis.call('ZRANK', lock.queue, run), Holds.next_lapse(call, lock) }
  else
    reply[i] = { 'LOST' }
  end
end
return reply
