-- lib/parked: executions that wait without a process: their messages, and who resumes them.

local Parked = {}

-- For TRIP ms a message that was handed out counts as on its way; each further time for twice as long, as
-- the broker can be slow, up to LONGEST.
local TRIP, LONGEST = 5000, 600000
-- So often a copy for one worker is handed out, in 75 s: what the broker has by then is executed all the same.
local MOST_TRIPS = 5
-- After so many ms a message on its way no longer holds up the executions behind it: its queue might have
-- no worker.
local OVERDUE = 60000
-- A lock with parked executions is looked at every LOOK ms, whatever else was missed.
local LOOK = 10000
-- The most messages in a reply; the others are owed.
local MOST = 100

-- No message is on its way for longer than LONGEST, unless the clock was set back meanwhile.
function Parked.on_its_way(call, waiter)
  local left = waiter.parked and waiter.back and waiter.back - call.now or 0
  return left > 0 and left <= LONGEST
end

-- How many permits a message on its way will need (1 or 0), and of which kind.
function Parked.promise(call, lock, execution, waiter)
  local limit, is_early = Holds.limit_of(lock, waiter), math.abs(call.now - waiter.first) < OVERDUE
  -- Older arguments must not run after newer ones while somebody can publish them.
  is_early = is_early or Queue.is_burst(lock) and not waiter.untold
  local comes_anew = is_early and not Holds.permit_of(lock, execution, waiter, limit)
  return comes_anew and 1 or 0, limit == Holds.SHARED and 'shared' or 'exclusive'
end

-- A process can have several apps, each with its own broker.
local function can_send(call, home)
  return string.find(' ' .. call.home .. ' ', ' ' .. home .. ' ', 1, true) ~= nil
end

-- Whether to hand a message on its way to this caller again: the reply to its command was lost, or nobody
-- could publish the message so far.
local function is_owed(call, execution, waiter)
  local here = waiter.by == call.by or waiter.untold and can_send(call, waiter.home)
  return here and not call.given[execution]
end

-- Note that a message is owed, and notify the processes that can publish it.
local function owe(call, execution, waiter)
  waiter.untold = true
  local since = string.format('%.0f', call.micros)
  redis.call('ZADD', call.prefix .. 'owed:' .. waiter.home, 'NX', since, execution)
  publish(call.prefix .. 'i:parked', 'parked ' .. execution .. ' ' .. waiter.home)
end

local function is_given_up(waiter)
  return waiter.is_copy and (waiter.sent or 0) >= MOST_TRIPS
end

-- Hand a message to the caller if it can publish the message; else notify a process that can. The message
-- stays here until its execution has the lock, because its publisher or the broker can die. False if the
-- message is gone (the server evicts keys), or its worker seems to be: its place goes as well.
function Parked.hand_out(call, lock, execution, waiter)
  local name = waiter.names and waiter.names[1] or lock.name
  local text = redis.call('HGET', call.prefix .. 'm:' .. name, execution)
  if not text or is_given_up(waiter) then
    Queue.leave(call, lock, execution, waiter)
    return false
  end
  waiter.first = math.min(waiter.first or call.now, call.now)
  if can_send(call, waiter.home) and #call.messages < 3 * MOST then
    waiter.sent = (waiter.sent or 0) + 1
    waiter.by, waiter.untold = call.by, nil
    redis.call('ZREM', call.prefix .. 'owed:' .. waiter.home, execution)
    call.given[execution] = true
    table.insert(call.messages, execution)
    table.insert(call.messages, name)
    table.insert(call.messages, text)
  else
    owe(call, execution, waiter)
  end
  -- A burst is published, not executed: without a report the broker cannot be reached.
  local trips = math.min(math.max((waiter.sent or 0) - 1, 0), Queue.is_burst(lock) and 1 or math.huge)
  waiter.back = call.now + math.min(TRIP * 2 ^ trips, LONGEST)
  Queue.write_all(call, lock, execution, waiter)
  return true
end

-- Hand out a message, unless it is on its way already and not owed to this caller. False if it is gone.
function Parked.send(call, lock, execution, waiter)
  local is_sent = Parked.on_its_way(call, waiter) and not is_owed(call, execution, waiter)
  return is_sent or Parked.hand_out(call, lock, execution, waiter)
end

-- Let all ask once more whom others can wait for, though their turns have not come.
function Parked.ask_again(call, line)
  for _, execution in ipairs(redis.call('ZRANGE', line.queue, 0, Queue.MOST - 1)) do
    local waiter = Queue.waiter(line, execution)
    local is_here = waiter and waiter.parked and not Queue.is_awaited(line, execution, waiter)
    if is_here and waiter.stuck then
      Parked.send(call, line, execution, waiter)
    end
  end
end

-- Whether the executions behind a parked one can have a turn: its message is on its way.
function Parked.may_look_behind(call, lock, execution, waiter, caller)
  if Queue.behind_itself(call, lock, execution, waiter) then
    return true
  end
  if execution == caller or not Parked.on_its_way(call, waiter) then
    return false
  end
  Parked.send(call, lock, execution, waiter)
  Parked.count(call, lock, execution, waiter, lock)
  return true
end

-- A message that did not come back within its first trip is late. It can need the worker slot in which an
-- execution behind it waits, so it holds up parked executions alone; the others wait for the messages that
-- are `soon` back. `ahead`: what counts it, the lock itself or a look at what is ahead of one waiter.
function Parked.count(call, lock, execution, waiter, ahead)
  if waiter.parked then
    local promise, kind = Parked.promise(call, lock, execution, waiter)
    ahead.promised[kind] = ahead.promised[kind] + promise
    if call.now < waiter.first + TRIP then
      ahead.soon[kind] = ahead.soon[kind] + promise
    end
    ahead.look = math.min(ahead.look, waiter.back)
  end
end

-- Set when this lock has to be looked at for parked executions.
function Parked.schedule(call, lock)
  local pause
  if redis.call('EXISTS', lock.messages) == 1 then
    local lapse = Holds.next_lapse(lock)
    pause = math.min(lapse > 0 and lapse + 1 or LOOK, LOOK)
  elseif Holds.is_line(lock) and redis.call('EXISTS', lock.queue) == 1 then
    -- Only awaited places, and nobody waits for their messages. Look when they end.
    pause = Base.DAY
  end
  if pause then
    local look = string.format('%.0f', math.min(lock.look, call.now + pause))
    redis.call('ZADD', call.prefix .. 'due', look, 'l ' .. lock.name)
  end
end

-- At its deadline an execution is resumed with or without the lock, so that it fails in a worker.
local function keep_deadline(call, execution, waiter)
  if waiter.deadline then
    redis.call('ZADD', call.prefix .. 'due', string.format('%.0f', waiter.deadline), 'r ' .. execution)
  end
end

-- Store a message, and where to find it.
function Parked.keep(call, locks, execution, waiter, text)
  for i, lock in ipairs(locks) do
    redis.call('HSET', lock.messages, execution, i == 1 and text or '')
  end
  redis.call('HSET', call.prefix .. 'parked', execution, locks[1].name, '#' .. waiter.task, execution)
  Queue.count_parked(call, 1, #text)
  keep_deadline(call, execution, waiter)
end

-- The line and the place of a call whose message is awaited; nil if it has none.
function Parked.awaited(call, execution)
  local name = redis.call('GET', call.prefix .. 'sent:' .. execution)
  if not name then
    return nil
  end
  local line = Holds.open(call, call.prefix .. 'l:' .. name)
  local waiter = Queue.waiter(line, execution)
  return waiter and line, waiter
end

-- The first lock and the place of a parked execution; nil if it has none.
function Parked.find(call, execution)
  local name = redis.call('HGET', call.prefix .. 'parked', execution)
  if not name then
    return nil
  end
  local lock = Holds.open(call, call.prefix .. 'l:' .. name)
  local waiter = Queue.waiter(lock, execution)
  if not waiter or not waiter.parked or redis.call('HEXISTS', lock.messages, execution) == 0 then
    -- A server that evicts keys has deleted its place, or its message.
    local size = redis.call('HSTRLEN', lock.messages, execution)
    redis.call('HDEL', lock.messages, execution)
    Queue.forget_parked(call, execution, waiter and waiter.task, size)
    return nil
  end
  return lock, waiter
end

return Parked
