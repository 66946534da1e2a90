-- release: Release an execution's holds, or its places in the queues, and let the next waiters in.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] tombstone: string, how the execution ended
-- KEYS[3..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1.1] execution: id, the execution of one message
-- ARGV[1.2] attempt: id, the attempt that acquired the locks
-- ARGV[1.3] remember: ms, life of the tombstone
-- ARGV[1.4] ended: text, what has ended: `execution`, `retried`, `attempt` … (protocol.EndedAs); missing for nothing
-- ARGV[2] homes: ids with spaces between, the brokers that the caller can publish to; empty for none
-- ARGV[3.1] keep: ms, for how long the holds, or the place in a line, are kept for each successor; missing for none
-- ARGV[3.2..] successor: id, the executions that the holds are left to; `cooldown.…` is nobody
-- Reply {RELEASED, failed, execution, name, message, …}: its holds and places; what failed for others, if anything; messages to resume
-- Reply {GONE, failed, execution, name, message, …}: the attempt had none: released before, or lost; as above
-- Keeps: only the attempt that acquired a lock releases it; a kept hold stays in its permit; sent twice it acts once; the next get in
-- Uses: lib/publish

local meta, tombstone, first = KEYS[1], KEYS[2], KEYS[3]
local words, homes, leaves_to = ARGV[1], ARGV[2], ARGV[3] or '0 '
local keys = KEYS
local execution, attempt, remember, ended = string.match(words, '^(%S+) (%S+) (%d+) ?(%S*)$')
local keep, successors = string.match(leaves_to, '^(%d+) (.*)$')

local prefix = string.sub(meta, 1, -5)
local name = string.sub(first, string.len(prefix) + 3)

-- The short way, as in acquire: one lock that nobody waits for. It does not check whether the lease has
-- lapsed unseen: the holder's own clock does that.
local asks = ended == 'unacknowledged'
local over = (asks or ended == 'execution') and '*' or ended == 'retried' and '* retried'
local alone = #keys == 3 and successors == '' and (ended == '' or over)
local record = alone and redis.call('HGET', first, execution)
local by = record and string.match(record, '^%d+ %d+ (%S+) ')
local queue, ends = prefix .. 'q:' .. name, prefix .. 'e:' .. name
if by == attempt and redis.call('EXISTS', queue, ends) == 0 then
  redis.call('HDEL', first, execution, '@' .. execution)
  if over then
    redis.call('SET', tombstone, over, 'PX', remember)
  end
  return { ok = 'RELEASED' }
end

-- Uses: lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/lines, lib/turns

local call = Base.begin(meta)
call.home, call.by = homes, execution .. ' ' .. attempt
keep = tonumber(keep)
Base.write_without_memory(prefix)

local function release(lock)
  local hold = lock.holds[execution]
  if not hold or hold.attempt ~= attempt then
    return false
  end
  if successors ~= '' then
    lock.to_leave = { hold = hold, label = redis.call('HGET', lock.key, '@' .. execution) or '' }
  end
  Holds.drop(lock, execution)
  return true
end

-- An attempt is added to those that have ended: a copy of any of them can be on its way. An execution
-- that has ended stays ended.
local function remember_end()
  local before = not over and redis.call('GET', tombstone)
  if not Base.is_over(before) then
    local how = attempt .. (ended == 'killed' and ' killed ' or ' ')
    local for_good = over or ended == 'replaced' and '* replaced'
    redis.call('SET', tombstone, for_good or (before or ' ') .. how, 'PX', remember)
  end
end

local locks, is_queued = {}, false
for i = 3, #keys do
  Base.safely(call, keys[i], function()
    local lock = Holds.open(call, keys[i])
    lock.released = release(lock)
    lock.queued = redis.call('EXISTS', lock.queue) == 1
    is_queued = is_queued or lock.queued
    locks[#locks + 1] = lock
  end)
end

local function reply()
  local had = false
  for _, lock in ipairs(locks) do
    had = had or lock.released
  end
  if ended ~= '' and (ended ~= 'replaced' or had) then
    remember_end()
  end
  if call.failed and not had then
    error(call.failed, 0)
  end
  local what = had and { 'RELEASED' } or { 'GONE' }
  if not call.failed and #call.messages == 0 then
    return { ok = what[1] }
  end
  return { what[1], call.failed or '', unpack(call.messages) }
end

if not is_queued and successors == '' then
  return reply()
end

-- Somebody waits, perhaps this execution itself, or has to come.

local function leave_queue(lock)
  local waiter = lock.queued and Queue.waiter(lock, execution)
  -- A waiter in a process leaves with its attempt. A parked message stays when the attempt ends for which it
  -- was resumed, and leaves when its execution has ended; one of an execution that is not acknowledged asks
  -- for the result. It also leaves with the attempt that has parked it and does not know so, as it heard no
  -- answer; if that attempt was killed, the message is all that is left.
  -- The place of a call whose message is awaited is no attempt's: it leaves by a release of what is kept.
  local stays = ended == 'killed' or ended == 'parked'
  local parked_it = waiter and waiter.parked and not waiter.arrived and not stays
  local mine = waiter and waiter.attempt == attempt and (not waiter.parked or parked_it)
  local stays_to_ask = asks and waiter and not Queue.is_awaited(lock, execution, waiter)
  local leaves = mine or waiter and waiter.parked and over and not stays_to_ask
  if not leaves and waiter and waiter.parked and attempt == Base.KEPT then
    leaves = Queue.is_awaited(lock, execution, waiter)
  end
  if leaves then
    Queue.leave(call, lock, execution, waiter)
    lock.released = true
  end
end

-- A successor can have been quicker: it has joined the permit as a descendant, or has ended, or was
-- killed. Who has ended an attempt otherwise comes again. An execution that is its own successor lives,
-- whatever happened to an earlier attempt.
local function leave_to_successors(lock)
  local hold, label = lock.to_leave.hold, lock.to_leave.label
  for each in string.gmatch(successors, '%S+') do
    local how = redis.call('GET', call.prefix .. 'd:' .. each)
    local is_killed = how and string.find(how, ' killed $') and each ~= execution
    local comes = not Base.is_over(how) and not is_killed
    if comes and Holds.is_line(lock) then
      Lines.succeed(call, lock, each, hold, label, keep)
    elseif comes and not lock.holds[each] then
      -- A cooldown keeps everybody out, its own workflow too: nobody else has such an owner.
      local owner = string.sub(each, 1, 9) == 'cooldown.' and each or hold.owner
      local kept = { fence = hold.fence, attempt = Base.KEPT, owner = owner, shared = hold.shared }
      kept.expiry = call.now + keep
      Holds.write(lock, each, kept, label)
    end
  end
end

local function let_others_in(lock)
  Turns.promote(call, lock)
  -- One that waits already was quicker: it has a hold by now.
  for each in string.gmatch(Holds.is_line(lock) and '' or successors, '%S+') do
    Turns.serve_one(call, lock, each)
  end
end

for _, lock in ipairs(locks) do
  Base.safely(call, lock.key, leave_queue, lock)
  if lock.to_leave then
    Base.safely(call, lock.key, leave_to_successors, lock)
  end
end
-- After all releases: an execution that waits for several of these locks must find all of them free.
for _, lock in ipairs(locks) do
  Base.safely(call, lock.key, let_others_in, lock)
end
return reply()
