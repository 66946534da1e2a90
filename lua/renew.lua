-- renew: Extend the leases of up to a hundred holds.
-- KEYS[1..] lock: hash, the holds of a lock; one key per hold to extend
-- ARGV[1..] run, nonce, lease: id, id, ms; three per key
-- Reply {1 or 0, …}: per key, 1 extended, 0 lost
-- Keeps: a hold that was released, or whose lease has run out, is never brought back
-- Uses: lib/holds

local keys, claims = KEYS, ARGV
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local reply = {}
for i, key in ipairs(keys) do
  local run, nonce, lease = claims[3 * i - 2], claims[3 * i - 1], tonumber(claims[3 * i])
  -- pcall: one key that somebody overwrote must not cost the other holds their renewal.
  local record = redis.pcall('HGET', key, run)
  local text = type(record) == 'string' and record or ''
  local expiry, fence, held_by, owner = string.match(text, '^(%d+) (%d+) (%S+) (%S+) %l$')
  if held_by == nonce and tonumber(expiry) > now then
    local bound = Holds.bound(lease)
    redis.call('HSET', key, run, string.format('%.0f %s %s %s %s', now + lease, fence, nonce, owner, bound))
    -- Only ever longer: another hold of this lock may have a longer lease than this one.
    if redis.call('PTTL', key) < lease + 1000 then
      redis.call('PEXPIRE', key, lease + Holds.GRACE)
    end
    reply[i] = 1
  else
    reply[i] = 0
  end
end
return reply
