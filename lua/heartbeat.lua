-- heartbeat: Keep the places of waiting runs, and find the grants whose message was missed.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2..] lock: hash, the holds of a lock; one key per waiter
-- ARGV[1..] run, nonce, wait, lease: id, id, ms, ms; four per lock key
-- Reply {{HELD, fence}, …}: the run has the lock, for a whole lease from now
-- Reply {{WAIT, rank, ms}, …}: still queued; look again after ms, when the next lease ends
-- Reply {{LOST}, …}: no hold and no place: the lease ran out
-- Keeps: a lost wake-up delays by one heartbeat; a dead holder is found by whoever waits
-- Uses: lib/call, lib/holds, lib/queue

local meta, keys, claims = KEYS[1], KEYS, ARGV
local call = Call.begin(meta)

-- First all places are kept, then the heads get in: else a head of this very call would look dead.
local places = {}
for i = 2, #keys do
  local lock = Holds.open(call, keys[i])
  local run, nonce, wait = claims[4 * i - 7], claims[4 * i - 6], tonumber(claims[4 * i - 5])
  local waiter = Queue.waiter(lock, run)
  if waiter and waiter.nonce == nonce and waiter.expiry > call.now then
    waiter.expiry = call.now + wait
    Queue.write(lock, run, waiter)
    places[i] = true
  end
end

local reply = {}
for i = 2, #keys do
  local lock = Holds.open(call, keys[i])
  local run, nonce, lease = claims[4 * i - 7], claims[4 * i - 6], tonumber(claims[4 * i - 4])
  if places[i] and not lock.holds[run] then
    Queue.promote(call, lock, run)
  end
  local hold = lock.holds[run]
  if hold and hold.nonce == nonce then
    hold.expiry = call.now + lease
    local who = redis.call('HGET', lock.key, '@' .. run) or ''
    Holds.drop(lock, run)
    Holds.write(lock, run, hold, who)
    reply[i - 1] = { 'HELD', hold.fence }
  elseif places[i] then
    reply[i - 1] = { 'WAIT', redis.call('ZRANK', lock.queue, run), Holds.next_lapse(call, lock) }
  else
    reply[i - 1] = { 'LOST' }
  end
end
return reply
