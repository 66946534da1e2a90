-- inspect: Return who holds a lock and who waits for it, and change nothing.
-- KEYS[1] lock: hash, the holds of the lock
-- KEYS[2] queue: sorted set, the executions that wait
-- KEYS[3] waiters: hash, what is known of each waiter
-- ARGV[1] most: count, waiters to return
-- Reply {holds, waiters, waiting}: holds and waiters as lists of facts, and how many places the queue has
-- Keeps: reads only; lapsed holds and waiters are left out
-- Uses: lib/base

local lock, queue, waiters = KEYS[1], KEYS[2], KEYS[3]
local most = tonumber(ARGV[1])
local now = math.floor(Base.micros() / 1000)

local labels, held = {}, {}
local fields = redis.call('HGETALL', lock)
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 1) == '@' then
    labels[string.sub(fields[i], 2)] = fields[i + 1]
  end
end
for i = 1, #fields, 2 do
  local execution = fields[i]
  if string.sub(execution, 1, 1) ~= '@' then
    local hold = Base.parse(fields[i + 1])
    if not hold then
      error('RELOCK-FOREIGN ' .. lock)
    end
    if hold.expiry > now then
      local left = math.min(hold.expiry - now, Base.longest(hold.bound))
      local label = labels[execution] or ''
      local shared = hold.shared and 1 or 0
      held[#held + 1] = { execution, left, hold.fence, hold.attempt, hold.owner, label, shared }
    end
  end
end

local queued = {}
for _, execution in ipairs(redis.call('ZRANGE', queue, 0, most - 1)) do
  local waiter = Base.decoded(redis.call('HGET', waiters, execution))
  if waiter and (waiter.parked or waiter.expiry > now) then
    local label, left = waiter.inbox .. ' ' .. waiter.label, waiter.expiry - now
    local parked = waiter.parked and 1 or 0
    queued[#queued + 1] = { execution, left, waiter.attempt, waiter.owner, label, parked }
  end
end
return { held, queued, redis.call('ZCARD', queue) }
