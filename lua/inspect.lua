-- inspect: Return who holds a lock and how many wait for it, and change nothing.
-- KEYS[1] lock: hash, the holds of the lock
-- KEYS[2] queue: sorted set, the executions that wait
-- Reply {holds, waiting}: holds as lists of facts, and how many places the queue has
-- Keeps: reads only; lapsed holds are left out
-- Uses: lib/base

local lock, queue = KEYS[1], KEYS[2]
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
return { held, redis.call('ZCARD', queue) }
