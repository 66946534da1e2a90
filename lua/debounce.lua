-- debounce: Park a call's message until its burst is over; it replaces the message that is parked.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] tombstone: string, the burst that this call was merged into, or `-` if it was refused
-- KEYS[3] lock: hash, the lock of these calls: its one hold is the pause, its waiters are bursts
-- ARGV[1] burst: id, the burst of the call: a new burst, or the burst of an earlier reply
-- ARGV[2] call: id, this call
-- ARGV[3] known: id, the last call of the burst in that reply; empty for a new burst
-- ARGV[4] exactly: 1 or 0, whether to refuse if another call was merged since; also asks for the message
-- ARGV[5] pause: ms, how long without a call until the burst is over
-- ARGV[6] most: ms, how long after its first call the burst is over in any case
-- ARGV[7] remember: ms, for how long a repetition of this command is recognised
-- ARGV[8] label: text, the call for people
-- ARGV[9] place: text, the message and what belongs to it as JSON; empty asks for the burst and changes nothing
-- Reply {PARKED}: the message is parked, the only message of its burst
-- Reply {BURST, burst, call, task, message}: the burst is another: its last call, its task, and the message if asked for
-- Reply {NONE}: the burst is over, or there is none
-- Reply {FULL, index, count, bytes}: no room: so many messages are parked at the lock (1) or in all (0)
-- Keeps: a message that was handed out is never replaced; a burst ends after its longest time; sent twice it acts once
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/claim

local meta, tombstone, key = KEYS[1], KEYS[2], KEYS[3]
local burst, caller, known, exactly = ARGV[1], ARGV[2], ARGV[3], ARGV[4] == '1'
local pause, most, remember = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local label, place = ARGV[8], ARGV[9]

local PAUSE = 'pause'

local REFUSED = '-'
local before = redis.call('GET', tombstone)
local was_refused = before == REFUSED
if before and not was_refused then
  Base.promise_again(meta)
  return { ok = 'PARKED' }
end
local call = Base.begin(meta)
local lock = Holds.open(call, key)
lock.index_of_claim = 1

-- The caller that hears this goes on with another call: a copy of this one must not be merged later.
local function refuse(reply)
  if place ~= '' then
    redis.call('SET', tombstone, REFUSED, 'PX', remember)
  end
  return reply
end

-- The burst whose message was not handed out yet: only the last in the queue can be one.
local open = redis.call('ZREVRANGE', lock.queue, 0, 0)[1]
local waiter = open and Queue.waiter(lock, open)
if waiter and (waiter.sent or redis.call('HEXISTS', lock.messages, open) == 0) then
  waiter = nil
end
if not waiter and (known ~= '' or place == '' or was_refused) then
  return refuse { 'NONE' }
end
local is_known = known ~= '' and open == burst and (not exactly or waiter.attempt == known)
if waiter and not is_known then
  local message = exactly and redis.call('HGET', lock.messages, open) or ''
  return refuse { 'BURST', open, waiter.attempt, waiter.call, message }
end

local asked = cjson.decode(place)
local me = {
  call = call,
  execution = burst,
  attempt = caller,
  owner = burst,
  lease = pause,
  inbox = '-',
  label = label,
  by_owner = false,
  ancestors = '',
  locks = { lock },
  limits = { 1 },
  asked = asked,
  is_parked = redis.call('HEXISTS', call.prefix .. 'parked', burst) == 1,
}
local full = Claim.full(me, me.locks)
if full then
  return refuse { 'FULL', unpack(full) }
end

-- The pause is a hold that only the next call renews. The burst's ticket is the time of its first call; a
-- fencing token can be ahead of the clock. Without the pause the burst is over, and only waits for a
-- process that can publish its message.
local held = lock.holds[PAUSE]
if held or not waiter then
  local fence = waiter and held.fence or Base.next_fence(meta, call.micros)
  local first = waiter and math.floor(redis.call('ZSCORE', lock.queue, open) / 1000) or call.now
  local expiry = math.max(math.min(call.now + pause, first + most), call.now + 1)
  local hold = { expiry = expiry, fence = fence, attempt = Base.KEPT, owner = PAUSE }
  Holds.write(lock, PAUSE, hold, '- a burst of calls')
end
asked.call = waiter and waiter.call or asked.id
Claim.park(me, { locks = me.locks, limits = me.limits })
redis.call('SET', tombstone, burst, 'PX', remember)
if waiter and not held then
  redis.call('ZADD', call.prefix .. 'due', string.format('%.0f', call.now), 'l ' .. lock.name)
elseif not waiter then
  -- So that the processes that publish know when to look.
  publish(call.prefix .. 'i:parked', 'parked ' .. burst .. ' ' .. asked.home)
end
return { ok = 'PARKED' }
