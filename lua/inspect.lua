-- inspect: Tell who holds a lock and who waits for it, and change nothing.
-- KEYS[1] lock: hash, the holds of the lock
-- KEYS[2] queue: sorted set, the runs that wait
-- KEYS[3] waiters: hash, what is known of them
-- ARGV[1] most: count, waiters to tell of
-- Reply {holds, waiters, waiting}: holds and waiters as lists of facts, and how many places the queue has
-- Keeps: reads only; what has lapsed is not told
-- Uses: lib/base

local lock, queue, waiters = KEYS[1], KEYS[2], KEYS[3]
local most = tonumber(ARGV[1])
local now = math.floor(Base.micros() / 1000)

local who, held = {}, {}
local fields = redis.call('HGETALL', lock)
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 1) == '@' then
    who[string.sub(fields[i], 2)] = fields[i + 1]
  end
end
for i = 1, #fields, 2 do
  local run = fields[i]
  if string.sub(run, 1, 1) ~= '@' then
    local expiry, fence, nonce, owner, bound = string.match(fields[i + 1], '^(%d+) (%d+) (%S+) (%S+) (%l)$')
    if not expiry then
      error('RELOCK-FOREIGN ' .. lock)
    end
    if tonumber(expiry) > now then
      local left = math.min(tonumber(expiry) - now, Base.longest(bound))
      held[#held + 1] = { run, left, fence, nonce, owner, who[run] or '' }
    end
  end
end

local queued = {}
for _, run in ipairs(redis.call('ZRANGE', queue, 0, most - 1)) do
  local record = redis.call('HGET', waiters, run)
  local waiter = record and cjson.decode(record)
  if waiter and (waiter.parked or waiter.expiry > now) then
    local who_waits, left = waiter.inbox .. ' ' .. waiter.who, waiter.expiry - now
    local parked = waiter.parked and 1 or 0
    queued[#queued + 1] = { run, left, waiter.nonce, waiter.owner, who_waits, parked }
  end
end
return { held, queued, redis.call('ZCARD', queue) }
