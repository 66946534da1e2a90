-- renew: Renew the leases of up to a hundred holds.
-- KEYS[1..] lock: hash, the holds of a lock; one key per hold to renew
-- ARGV[1..] execution attempt lease longer: id, id, ms, 1 or 0: whether never to shorten the lease; such words per key
-- Reply {1 or 0, …}: per key, 1 renewed, 0 lost
-- Keeps: a hold that was released, or whose lease has run out, is never brought back; a foreign key hurts its own lock alone
-- Uses: lib/module, lib/base

local keys, claims = KEYS, ARGV
local now = math.floor(Base.micros() / 1000)

local function renew(key, execution, attempt, lease, longer)
  local hold = Base.parse(redis.call('HGET', key, execution))
  if not hold or hold.attempt ~= attempt or hold.expiry <= now then
    return 0
  end
  -- A renewal that was on its way when the holder extended the lease must not shorten it again. A hold
  -- that would outlive all its leases was written before the clock was set back.
  local kept = longer and hold.expiry > now + lease and hold.expiry <= now + Base.longest(hold.bound)
  hold.expiry = kept and hold.expiry or now + lease
  redis.call('HSET', key, execution, Base.record(hold, now))
  Base.outlive(lease, key)
  return 1, hold.expiry
end

-- The index of a lock with many holds, see lib/holds.
local function note(key, execution, lease, expiry)
  local prefix, name = string.match(key, '^(.-}:)l:(.*)$')
  local ends, fences, owners = prefix .. 'e:' .. name, prefix .. 'f:' .. name, prefix .. 'o:' .. name
  if redis.call('ZADD', ends, 'XX', 'CH', string.format('%.0f', expiry), execution) == 1 then
    Base.outlive(lease, ends, fences, owners)
  end
end

-- As Base.write_without_memory, with a key of the call: while a slot of a cluster moves, a node gives a
-- script no other key. Foreign keys are passed over.
for _, key in ipairs(keys) do
  local answer = redis.pcall('HDEL', key, '-')
  local is_refused = type(answer) == 'table'
  if is_refused and not Base.is_foreign(answer) then
    return answer
  elseif not is_refused then
    break
  end
end
local reply, failure = {}, nil
for i, key in ipairs(keys) do
  local execution, attempt, lease, longer = string.match(claims[i], '^(%S+) (%S+) (%d+) ([01])$')
  lease = tonumber(lease)
  -- pcall: a foreign key must not cost the other holds their renewal.
  local fine, renewed, expiry = pcall(renew, key, execution, attempt, lease, longer == '1')
  reply[i] = fine and renewed or 0
  if not fine and not Base.is_foreign(renewed) then
    failure = failure or renewed  -- a permission is missing, say: the hold is not lost
  end
  if fine and expiry then
    pcall(note, key, execution, lease, expiry)  -- the index can be at another node by now
  end
end
if failure then
  error(failure, 0)
end
return reply
