-- renew: Extend the leases of up to a hundred holds.
-- KEYS[1..] lock: hash, the holds of a lock; one key per hold to extend
-- ARGV[1..] run, nonce, lease, longer: id, id, ms, 1 or 0: whether only ever longer; four per key
-- Reply {1 or 0, …}: per key, 1 extended, 0 lost
-- Keeps: a hold that was released, or whose lease has run out, is never brought back
-- Uses: lib/base

local keys, claims = KEYS, ARGV
local now = math.floor(Base.micros() / 1000)

local reply = {}
for i, key in ipairs(keys) do
  local run, nonce, lease = claims[4 * i - 3], claims[4 * i - 2], tonumber(claims[4 * i - 1])
  -- pcall: one key that somebody overwrote must not cost the other holds their renewal.
  local record = redis.pcall('HGET', key, run)
  local text = type(record) == 'string' and record or ''
  local expiry, fence, held_by, owner, bound = string.match(text, '^(%d+) (%d+) (%S+) (%S+) (%l)$')
  if held_by == nonce and tonumber(expiry) > now then
    local ends, before = now + lease, tonumber(expiry)
    -- A renewal that was on its way when the holder asked for a longer lease must not undo that. What
    -- would end later than any lease of this hold was written before the clock was set back.
    if claims[4 * i] == '1' and before > ends and before <= now + Base.longest(bound) then
      ends = before
    end
    local hold = { expiry = ends, fence = fence, nonce = nonce, owner = owner }
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
