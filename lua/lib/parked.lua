-- lib/parked: runs that wait without a process: their messages, and who sends them on.

local Parked = {}

-- For so long, in ms, a message that was handed out counts as being on its way; doubled each time
-- that nobody came, as a broker may be slow, and up to a bound.
local TRIP, LONGEST = 5000, 600000
-- Who has been on the way for so long no longer holds up those behind: its queue may have no worker.
local OVERDUE = 60000
-- A lock with parked runs is looked at so often, in ms, whatever else was missed.
local LOOK = 10000
-- No reply has more messages than this; the others are owed.
Parked.MOST = 100

-- Nothing is on its way for longer than LONGEST: then the clock was set back meanwhile.
function Parked.on_its_way(call, waiter)
  local left = waiter.parked and waiter.back and waiter.back - call.now or 0
  return left > 0 and left <= LONGEST
end

-- Entries that are spoken for by a message on its way: 1 or 0.
function Parked.promise(call, lock, run, waiter)
  local comes_anew = math.abs(call.now - waiter.first) < OVERDUE and not Queue.entry_of(lock, run, waiter)
  return comes_anew and 1 or 0
end

-- Whether a message on its way is to be handed out to this caller all the same: the reply to its
-- command was lost, or nobody could send it so far and this one can.
function Parked.is_owed(call, run, waiter)
  local here = waiter.by == call.by or waiter.untold and waiter.home == call.home
  return here and not call.given[run]
end

local function write(call, lock, run, waiter)
  for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
    Queue.write(call, each, run, waiter)
  end
end

-- It is put where those who can send it look, and they are called.
local function owe(call, lock, run, waiter)
  waiter.untold = true
  redis.call('ZADD', call.prefix .. 'owed:' .. waiter.home, 'NX', string.format('%.0f', call.micros), run)
  publish(call.prefix .. 'i:parked', 'parked ' .. run .. ' ' .. waiter.home)
  table.insert(call.untold, { lock = lock, run = run, waiter = waiter })
end

-- The message stays here until its run has the lock: whoever gets it to send may die, and so may
-- the broker. A caller that cannot send it to where it came from calls for one that can. False: the
-- message is not there any more (a server that evicts keys), so its place goes as well.
function Parked.hand_out(call, lock, run, waiter)
  local name = waiter.names and waiter.names[1] or lock.name
  local text = redis.call('HGET', call.prefix .. 'm:' .. name, run)
  if not text then
    Queue.leave(call, lock, run, waiter)
    return false
  end
  waiter.first = math.min(waiter.first or call.now, call.now)
  if waiter.home == call.home and #call.messages < 3 * Parked.MOST then
    waiter.sent = (waiter.sent or 0) + 1
    waiter.by, waiter.untold = call.by, nil
    redis.call('ZREM', call.prefix .. 'owed:' .. waiter.home, run)
    call.given[run] = true
    table.insert(call.messages, run)
    table.insert(call.messages, name)
    table.insert(call.messages, text)
  else
    owe(call, lock, run, waiter)
  end
  local trips = math.max((waiter.sent or 0) - 1, 0)
  waiter.back = call.now + math.min(TRIP * 2 ^ trips, LONGEST)
  write(call, lock, run, waiter)
  return true
end

-- What this call owes to those of this home, it hands out itself.
function Parked.settle(call, home)
  call.home = home
  for _, each in ipairs(call.untold) do
    local mine = each.waiter.home == home and not call.given[each.run]
    if mine and #call.messages < 3 * Parked.MOST then
      Parked.hand_out(call, each.lock, each.run, each.waiter)
    end
  end
end

-- For a waiter in the line: whether those behind it may be looked at, and from when on it may be
-- handed out again.
function Parked.pass(call, lock, run, waiter, caller)
  if Queue.behind_itself(call, lock, run, waiter) then
    return true
  end
  if run == caller or not Parked.on_its_way(call, waiter) then
    return false
  end
  if Parked.is_owed(call, run, waiter) then
    Parked.hand_out(call, lock, run, waiter)
  end
  Parked.count(call, lock, run, waiter)
  return true
end

-- `late`: what was not there within its first trip. It may need the very worker slot that somebody
-- behind it waits in, so it holds up only those that are parked themselves.
function Parked.count(call, lock, run, waiter)
  if waiter.parked then
    local promise = Parked.promise(call, lock, run, waiter)
    lock.promised = lock.promised + promise
    lock.late = lock.late + (call.now >= waiter.first + TRIP and promise or 0)
    lock.look = math.min(lock.look, waiter.back)
  end
end

-- When the next one who looks for parked runs is to look at this lock.
function Parked.schedule(call, lock)
  if redis.call('EXISTS', lock.messages) == 1 then
    local lapse = Holds.next_lapse(call, lock)
    local look = math.min(lock.look, call.now + (lapse > 0 and lapse + 1 or LOOK), call.now + LOOK)
    redis.call('ZADD', call.prefix .. 'due', string.format('%.0f', look), 'l ' .. lock.name)
  end
end

-- A run that may wait only so long is sent on then, lock or not, to fail where tasks fail.
local function keep_deadline(call, run, waiter)
  if waiter.deadline then
    redis.call('ZADD', call.prefix .. 'due', string.format('%.0f', waiter.deadline), 'r ' .. run)
  end
end

-- The message and where to find it. Its place has been written by Queue.enter.
function Parked.keep(call, locks, run, waiter, text)
  for i, lock in ipairs(locks) do
    redis.call('HSET', lock.messages, run, i == 1 and text or '')
  end
  redis.call('HSET', call.prefix .. 'parked', run, locks[1].name, '#' .. waiter.task, run)
  keep_deadline(call, run, waiter)
end

-- A parked run by its id: its first lock and its place, if it has one.
function Parked.find(call, run)
  local name = redis.call('HGET', call.prefix .. 'parked', run)
  if not name then
    return nil
  end
  local lock = Holds.open(call, call.prefix .. 'l:' .. name)
  local waiter = Queue.waiter(lock, run)
  if not waiter or not waiter.parked then
    redis.call('HDEL', call.prefix .. 'parked', run)
    return nil
  end
  return lock, waiter
end
