-- renew: Extend the leases of up to a hundred holds.
-- KEYS[1..] lock: hash, the holds of a lock; one key per hold to extend
-- ARGV[1..] run, nonce, lease: id, id, ms; three per key
-- Reply {1 or 0, …}: per key, 1 extended, 0 lost
-- Keeps: a hold that was released, or whose lease has run out, is never brought back
-- Uses: lib/base

local keys, claims = KEYS, ARGV
local now = math.floor(Base.micros() / 1000)

local reply = {}
for i, key in ipairs(keys) do
  local run, nonce, lease = claims[3 * i - 2], claims[3 * i - 1], tonumber(claims[3 * i])
  -- pcall: one key that somebody overwrote must not cost the other holds their renewal.
  local record = redis.pcall('HGET', key, run)
  local text = type(record) == 'string' and record or ''
  local expiry, fence, held_by, owner = string.match(text, '^(%d+) (%d+) (%S+) (%S+) %l$')
  if held_by == nonce and tonumber(expiry) > now then
    local hold = { expiry = now + lease, fence = fence, nonce = nonce, owner = owner }
    redis.call('HSET', key, run, Base.record(hold, now))
    -- Only ever longer: another hold of this lock may have a longer lease than this one.
    if redis.call('PTTL', key) < lease + 1000 then
      redis.call('PEXPIRE', key, lease + Base.GRACE)
    end
    reply[i] = 1
  else
    reply[i] = 0
  end
end
return reply
