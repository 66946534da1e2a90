-- lib/base: the server's time, the next fencing token, the record of a hold.

local Base = {}

-- Longer, in ms, than any pause in which a key without live holds may stay behind.
Base.GRACE = 60000

function Base.micros()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- A server without memory refuses a script's first write if that write may need memory, and no write
-- after one that was allowed. A first write that deletes is allowed, so whoever has a hold or a place
-- keeps it and can release it. (Redis 6.2 to 7.x and Valkey; the key never exists.)
function Base.write_without_memory(prefix)
  redis.call('DEL', prefix .. '-')
end

-- Higher than every fencing token before it, also after the counter was lost (time has moved on) and
-- after the clock was set back (the counter is kept); not if both happen at once. '%.0f': tostring()
-- would round to 14 digits. Spent before anybody hears of the token: a server that may not write stops
-- the script here, while no message is out.
function Base.next_fence(meta, micros)
  local last = tonumber(redis.call('HGET', meta, 'fence') or 0)
  local fence = string.format('%.0f', math.max(last + 1, micros))
  redis.call('HSET', meta, 'fence', fence)
  return fence
end

-- At the end of a hold's record: no lease of this hold was longer than 2^n ms, n as a letter; `z` says
-- nothing. A hold that would live longer than that from now was written before the clock was set back.
-- The letter of a shared hold is a capital.
function Base.bound(lease, shared)
  local _, exponent = math.frexp(lease)
  return string.char((shared and 65 or 97) + math.min(exponent, 25))
end

function Base.longest(bound)
  return bound == 'z' and math.huge or 2 ^ (string.byte(bound) - 97)
end

function Base.record(hold, now)
  local bound = Base.bound(hold.expiry - now, hold.shared)
  return string.format('%.0f %s %s %s %s', hold.expiry, hold.fence, hold.attempt, hold.owner, bound)
end

-- The hold that a record tells of; nil for what no script of ours wrote.
function Base.parse(record)
  local expiry, fence, attempt, owner, bound =
    string.match(record or '', '^(%d+) (%d+) (%S+) (%S+) (%a)$')
  if not expiry then
    return nil
  end
  return {
    expiry = tonumber(expiry),
    fence = fence,
    attempt = attempt,
    owner = owner,
    bound = string.lower(bound),
    shared = string.byte(bound) < 97,
  }
end

-- Keys outlive what is in them by a moment and no more, should nobody look again. Only ever longer:
-- something else in them may have a longer life than this.
function Base.outlive(life, first, ...)
  if redis.call('PTTL', first) < life + 1000 then
    for _, key in ipairs({ first, ... }) do
      redis.call('PEXPIRE', key, life + Base.GRACE)
    end
  end
end

-- The record of a place in a line whose message is to come.
function Base.awaited(label, task, line)
  return {
    attempt = '-',
    owner = '-',
    inbox = '-',
    label = label,
    task = task,
    home = '',
    parked = true,
    limits = { 1 },
    lease = 0,
    life = 0,
    expiry = line.ends,
    line = line,
  }
end

-- The waiter that a record tells of; nil for none, and for what no script of ours wrote.
function Base.decoded(record)
  local fine, waiter = pcall(cjson.decode, record or '')
  local is_ours = fine and type(waiter) == 'table' and waiter.attempt and tonumber(waiter.expiry)
  return is_ours and waiter or nil
end
