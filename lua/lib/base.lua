-- lib/base: the server's time, the state of a call, the next fencing token, the record of a hold.

local Base = {}

-- How long, in ms, keys outlive their last hold or place, and a line the due time of its last place.
Base.GRACE, Base.DAY = 60000, 86400000

-- The attempt of a hold that is kept for an execution, or of a place, whose message has not come yet. No
-- attempt has this id.
Base.KEPT = '-'

function Base.micros()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- The state of a call: the server's time, the bucket, the locks, the messages to resume.
function Base.begin(meta)
  local micros = Base.micros()
  return {
    meta = meta,
    prefix = string.sub(meta, 1, -string.len('meta') - 1),
    micros = micros,
    now = math.floor(micros / 1000),
    locks = {},
    -- Where waiters for several locks have left; see lib/turns.
    to_promote = {},
    -- The execution of this call, if it has come back for other locks; see lib/claim.
    leaving = nil,
    -- The brokers that the caller can publish to, and the id of its command; see lib/parked.
    home = '',
    by = '',
    messages = {},
    given = {},
    -- What could not be done for somebody else than the caller; see safely.
    failed = nil,
  }
end

-- A server without memory refuses a script's first write if that write might need memory, but no write
-- after an allowed one. A deletion is allowed as the first write, so holders and waiters can keep and
-- release what they have. (Redis 6.2 to 7.x and Valkey; the key never exists.)
function Base.write_without_memory(prefix)
  redis.call('DEL', prefix .. '-')
end

-- A reply that promises again what an earlier command has written: WAIT counts it if this call writes, too.
-- (Redis 7.2 and Valkey count what a client's own commands have written, Redis before that whatever was.)
function Base.promise_again(meta)
  Base.write_without_memory(string.sub(meta, 1, -5))
  redis.call('HINCRBY', meta, 'fence', 0)
end

-- Whether a tombstone is that of an execution that has ended, and not of attempts: see release.
function Base.is_over(tombstone)
  return tombstone and string.sub(tombstone, 1, 1) == '*'
end

-- Higher than every fencing token before it, even after the counter was lost (time has moved on) or the
-- clock was set back (the counter is kept), but not after both. '%.0f': tostring() would round to 14
-- digits.
function Base.next_fence(meta, micros)
  local last = tonumber(redis.call('HGET', meta, 'fence') or 0)
  local fence = string.format('%.0f', math.max(last + 1, micros))
  redis.call('HSET', meta, 'fence', fence)
  return fence
end

-- The letter at the end of a hold's record says that no lease of the hold was longer than 2^n ms (a for
-- n = 0; `z` says nothing). A hold that would live longer from now was written before the clock was set
-- back. The letter of a shared hold is a capital.
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

-- The hold of a record; nil for a foreign record.
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

-- Let keys outlive their content by Base.GRACE. Never shorten a life: other content of the keys can live
-- longer than this.
function Base.outlive(life, first, ...)
  if redis.call('PTTL', first) < life + 1000 then
    for _, key in ipairs({ first, ... }) do
      redis.call('PEXPIRE', key, life + Base.GRACE)
    end
  end
end

-- Lines (lib/lines) are locks whose waiters are the calls of `lock_order`, in the order in which they were
-- sent. A call has its place there before its message has come (it is awaited), and while it runs. These
-- three are here for the verbs that only place, or only look.

-- The record of a place in a line whose message is awaited: it has no owner and no inbox so far.
function Base.awaited(label, task, line)
  return {
    attempt = Base.KEPT,
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

-- Note where a place is, in keys that go by themselves when it has ended: its line may be gone by then, and
-- nobody can tell what was there.
function Base.note_place(prefix, name, execution, waiter, now)
  local life = math.max(waiter.line.ends - now, 0) + Base.GRACE
  redis.call('SET', prefix .. 'sent:' .. execution, name, 'PX', life)
  redis.call('SET', prefix .. 'sent:#' .. waiter.task, execution, 'PX', life)
end

-- How many at the head of a queue run: 1 if it is a line, and its first call holds it. That call keeps
-- its place until it has ended, if its message can come again.
function Base.running(lock_key, queue, waiters)
  local first = redis.call('ZRANGE', queue, 0, 0)[1]
  local runs = first and redis.call('HEXISTS', lock_key, first) == 1
  local waiter = runs and Base.decoded(redis.call('HGET', waiters, first))
  return waiter and waiter.line and 1 or 0
end

-- What an error says, which is a table since Redis 7.
function Base.said(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

-- Whether an error says that a key is somebody else's. Any other says nothing of the key: the user may not
-- read it, say, or its slot moves.
function Base.is_foreign(failure)
  local said = Base.said(failure)
  return string.find(said, 'WRONGTYPE', 1, true) or string.find(said, 'RELOCK-FOREIGN', 1, true)
end

-- Do a step for one of several locks or executions. An error must not keep the others from theirs: the
-- first one is told beside the reply, with the name of what it was for.
function Base.safely(call, name, step, ...)
  local fine, found = pcall(step, ...)
  if not fine then
    call.failed = call.failed or Base.said(found) .. ' (' .. name .. ')'
  end
  return fine, found
end

-- The waiter of a record; nil without a record, and for a foreign record.
function Base.decoded(record)
  local fine, waiter = pcall(cjson.decode, record or '')
  local is_ours = fine and type(waiter) == 'table' and waiter.attempt and tonumber(waiter.expiry)
  return is_ours and waiter or nil
end

return Base
