-- place: Take a place in a line, where calls run in the order in which they are sent, for a message to come.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] tombstone: string, how the execution ended
-- KEYS[3] lock: hash, the lock in whose queue the places are
-- KEYS[4..] lock: hash, the call's dedup marker, if it is to have one
-- ARGV[1] execution: id, the execution of the message
-- ARGV[2] task: id, of the task; a revoke names it
-- ARGV[3] label: text, the call for people
-- ARGV[4] gap: ms, how long those behind wait for the message when it is late
-- ARGV[5] delay: ms, from now to when the call is due
-- ARGV[6] moment: ms, since the epoch, when the call is due; 0 says nothing
-- ARGV[7] life: ms, from when the call is due to the end of the place, whatever becomes of the call
-- ARGV[8..] hold, lease, who: text, of its dedup marker the id of its hold, the ms that it lives without renewal, and whose it is
-- Reply {PLACED, ticket}: the execution has this place, and its marker
-- Reply {BUSY, index, ms, fence, owner, label, waiting, parked, shared, kept}: another call has the marker, as in acquire; no place
-- Reply {ENDED}: the execution has begun, or has ended, already
-- Keeps: tickets rise in the order of the commands, or of the times that calls are due; a duplicate takes no place; sent twice it acts once
-- Uses: lib/module, lib/base, lib/holds

local meta, tombstone, lock = KEYS[1], KEYS[2], KEYS[3]
local execution, task, label = ARGV[1], ARGV[2], ARGV[3]
local keys, options = KEYS, ARGV
local gap, delay, moment, life = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])

local prefix = string.sub(meta, 1, -5)
local name = string.sub(lock, string.len(prefix) + 3)
local queue, waiters, messages = prefix .. 'q:' .. name, prefix .. 'w:' .. name, prefix .. 'm:' .. name
local due_at = prefix .. 'due'
local micros = Base.micros()
local now = math.floor(micros / 1000)
local due = math.max(now + delay, moment)

-- Fencing tokens are never spent twice, and rise although the clock is set back: so does a ticket that
-- is one. A call that is due later stands among them by its time, behind all that are due in the same ms:
-- a place among these that is empty again is before calls that were sent earlier. A thousand fit into a ms.
local function next_ticket()
  if due <= now then
    return Base.next_fence(meta, micros)
  end
  local ticket = due * 1000
  while true do
    local highest = ticket + 999
    local range = { highest, ticket, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES' }
    local last = redis.call('ZRANGE', queue, unpack(range))[2]
    if not last or tonumber(last) < highest then
      return string.format('%.0f', last and last + 1 or ticket)
    end
    ticket = ticket + 1000
  end
end

local before = Base.decoded(redis.call('HGET', waiters, execution))
if before then
  -- A late copy of this command must not replace a place that its message was given without it.
  Base.promise_again(meta)
  return { 'PLACED', before.line and before.line.ticket or '0' }
end
-- The command may arrive after its message, and after the end of its execution, when the client sent it
-- again: those behind would wait for a message that does not come.
local running = Base.parse(redis.call('HGET', lock, execution))
if redis.call('EXISTS', tombstone) == 1 or running and running.expiry > now then
  return { 'ENDED' }
end

local function take_place()
  local ticket, ends = next_ticket(), due + life
  -- 0: the clock can be set back, and a call that is due at once is late no later for that.
  local line = { ticket = ticket, gap = gap, due = due > now and due or 0, ends = ends }
  line.expires = life < Base.DAY and ends or nil
  local waiter = Base.awaited(label, task, line)
  redis.call('ZADD', queue, ticket, execution)
  redis.call('HSET', waiters, execution, cjson.encode(waiter))
  Base.note_place(prefix, name, execution, waiter, now)
  -- While a message is parked there, the line lives without end.
  if redis.call('EXISTS', messages) == 0 then
    Base.outlive(ends - now, queue, waiters)
  end
  -- Should nobody come to look, somebody looks when the place has ended.
  redis.call('ZADD', due_at, 'NX', string.format('%.0f', ends + 1), 'l ' .. name)
  return { 'PLACED', ticket }
end

if not options[8] then
  return take_place()
end
local marker_hold, lease, who = options[8], tonumber(options[9]), options[10]

local marker = Holds.open(Base.begin(meta), keys[4])
local oldest, holder = Holds.oldest(marker)
if oldest and not marker.holds[marker_hold] then
  local text = redis.call('HGET', marker.key, '@' .. holder) or ''
  local kept = Holds.kept(marker, holder) and 1 or 0
  return { 'BUSY', 1, oldest.expiry - now, oldest.fence, oldest.owner, text, 0, 0, 0, kept }
end
if not oldest then
  local hold = { expiry = now + lease, attempt = Base.KEPT, owner = marker_hold }
  hold.fence = Base.next_fence(meta, micros)
  Holds.write(marker, marker_hold, hold, '- ' .. who)
end
return take_place()
