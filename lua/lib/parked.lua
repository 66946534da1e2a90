-- lib/parked: executions that wait without a process: their messages, and who resumes them.

local Parked = {}

-- For so long, in ms, a message that was handed out counts as being on its way; twice as long each time
-- that nobody came, as a broker may be slow, and up to a bound.
local TRIP, LONGEST = 5000, 600000
-- A message that has been on its way for so long no longer holds up those behind: its queue may have no
-- worker.
local OVERDUE = 60000
-- Somebody looks at a lock with parked executions so often, in ms, whatever else was missed.
local LOOK = 10000
-- No reply has more messages than this; the other messages are owed.
Parked.MOST = 100

-- Nothing is on its way for longer than LONGEST: then the clock was set back meanwhile.
function Parked.on_its_way(call, waiter)
  local left = waiter.parked and waiter.back and waiter.back - call.now or 0
  return left > 0 and left <= LONGEST
end

-- How many permits a message on its way will need, 1 or 0, and of which kind.
function Parked.promise(call, lock, execution, waiter)
  local limit, is_early = Holds.limit_of(lock, waiter), math.abs(call.now - waiter.first) < OVERDUE
  -- Older arguments after newer ones: never, as long as somebody can send them.
  is_early = is_early or Queue.is_burst(lock) and not waiter.untold
  local comes_anew = is_early and not Holds.permit_of(lock, execution, waiter, limit)
  return comes_anew and 1 or 0, limit == Holds.SHARED and 'shared' or 'exclusive'
end

-- A process may have several apps, each with a broker of its own.
local function can_send(call, home)
  return string.find(' ' .. call.home .. ' ', ' ' .. home .. ' ', 1, true) ~= nil
end

-- Whether a message on its way is to be handed out to this caller all the same: the reply to the
-- caller's command was lost, or nobody could send the message so far and this caller can.
function Parked.is_owed(call, execution, waiter)
  local here = waiter.by == call.by or waiter.untold and can_send(call, waiter.home)
  return here and not call.given[execution]
end

local function write(call, lock, execution, waiter)
  for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
    Queue.write(call, each, execution, waiter)
  end
end

-- Put the message where those look who can send it, and call them.
local function owe(call, lock, execution, waiter)
  waiter.untold = true
  local since = string.format('%.0f', call.micros)
  redis.call('ZADD', call.prefix .. 'owed:' .. waiter.home, 'NX', since, execution)
  publish(call.prefix .. 'i:parked', 'parked ' .. execution .. ' ' .. waiter.home)
  table.insert(call.untold, { lock = lock, execution = execution, waiter = waiter })
end

-- The message stays here until its execution has the lock: whoever is to send it may die, and so may the
-- broker. A caller that cannot send to the message's broker calls for somebody who can. False: the
-- message is not there any more (a server that evicts keys), so its place goes as well.
function Parked.hand_out(call, lock, execution, waiter)
  local name = waiter.names and waiter.names[1] or lock.name
  local text = redis.call('HGET', call.prefix .. 'm:' .. name, execution)
  if not text then
    Queue.leave(call, lock, execution, waiter)
    return false
  end
  waiter.first = math.min(waiter.first or call.now, call.now)
  if can_send(call, waiter.home) and #call.messages < 3 * Parked.MOST then
    waiter.sent = (waiter.sent or 0) + 1
    waiter.by, waiter.untold = call.by, nil
    redis.call('ZREM', call.prefix .. 'owed:' .. waiter.home, execution)
    call.given[execution] = true
    table.insert(call.messages, execution)
    table.insert(call.messages, name)
    table.insert(call.messages, text)
  else
    owe(call, lock, execution, waiter)
  end
  -- A burst is no task that may run for long: if nobody says that it was sent, the broker is away.
  local trips = math.min(math.max((waiter.sent or 0) - 1, 0), Queue.is_burst(lock) and 1 or math.huge)
  waiter.back = call.now + math.min(TRIP * 2 ^ trips, LONGEST)
  write(call, lock, execution, waiter)
  return true
end

-- Its worker has received the message, so the execution needs no second copy.
function Parked.put_off(call, lock, execution, waiter, back)
  waiter.back = math.max(waiter.back, back)
  write(call, lock, execution, waiter)
end

-- What this call owes to those who can send to these homes, it hands out itself.
function Parked.settle(call, homes)
  call.home = homes
  for _, each in ipairs(call.untold) do
    local mine = can_send(call, each.waiter.home) and not call.given[each.execution]
    if mine and #call.messages < 3 * Parked.MOST then
      Parked.hand_out(call, each.lock, each.execution, each.waiter)
    end
  end
end

-- Whether those behind a parked execution in the queue may be looked at: its message is on its way.
function Parked.pass(call, lock, execution, waiter, caller)
  if Queue.behind_itself(call, lock, execution, waiter) then
    return true
  end
  if execution == caller or not Parked.on_its_way(call, waiter) then
    return false
  end
  if Parked.is_owed(call, execution, waiter) then
    Parked.hand_out(call, lock, execution, waiter)
  end
  Parked.count(call, lock, execution, waiter)
  return true
end

-- `late`: messages that did not come back within their first trip. A late message may need the very
-- worker slot in which somebody behind it waits, so it holds up only those that are parked themselves;
-- the others wait for what is `soon` back.
function Parked.count(call, lock, execution, waiter)
  if waiter.parked then
    local promise, kind = Parked.promise(call, lock, execution, waiter)
    lock.promised[kind] = lock.promised[kind] + promise
    if call.now >= waiter.first + TRIP then
      lock.late = lock.late + promise
    else
      lock.soon[kind] = lock.soon[kind] + promise
    end
    lock.look = math.min(lock.look, waiter.back)
  end
end

-- When somebody who looks for parked executions is to look at this lock next.
function Parked.schedule(call, lock)
  if redis.call('EXISTS', lock.messages) == 1 then
    local lapse = Holds.next_lapse(call, lock)
    local look = math.min(lock.look, call.now + (lapse > 0 and lapse + 1 or LOOK), call.now + LOOK)
    redis.call('ZADD', call.prefix .. 'due', string.format('%.0f', look), 'l ' .. lock.name)
  elseif Queue.is_line(lock) and redis.call('EXISTS', lock.queue) == 1 then
    -- Nobody waits for those that are awaited. They end, some day.
    local look = math.min(lock.look, call.now + Queue.DAY)
    redis.call('ZADD', call.prefix .. 'due', string.format('%.0f', look), 'l ' .. lock.name)
  end
end

-- An execution whose patience ends is resumed then, lock or not, to fail where tasks fail.
local function keep_deadline(call, execution, waiter)
  if waiter.deadline then
    redis.call('ZADD', call.prefix .. 'due', string.format('%.0f', waiter.deadline), 'r ' .. execution)
  end
end

-- The message and where to find it. Queue.enter has written its place.
function Parked.keep(call, locks, execution, waiter, text)
  for i, lock in ipairs(locks) do
    redis.call('HSET', lock.messages, execution, i == 1 and text or '')
    if waiter.line then
      redis.call('PERSIST', lock.queue)
      redis.call('PERSIST', lock.waiters)
    end
  end
  redis.call('HSET', call.prefix .. 'parked', execution, locks[1].name, '#' .. waiter.task, execution)
  Queue.count_parked(call, 1, #text)
  keep_deadline(call, execution, waiter)
end

-- A call by its execution's id, whose message has not come: its line and its place, if it has one.
function Parked.awaited(call, execution)
  local name = redis.call('HGET', call.prefix .. 'sent', execution)
  if not name then
    return nil
  end
  local line = Holds.open(call, call.prefix .. 'l:' .. name)
  local waiter = Queue.waiter(line, execution)
  if not waiter then
    redis.call('HDEL', call.prefix .. 'sent', execution)
  end
  return waiter and line, waiter
end

-- A parked execution by its id: its first lock and its place, if it has one.
function Parked.find(call, execution)
  local name = redis.call('HGET', call.prefix .. 'parked', execution)
  if not name then
    return nil
  end
  local lock = Holds.open(call, call.prefix .. 'l:' .. name)
  local waiter = Queue.waiter(lock, execution)
  if not waiter or not waiter.parked then
    -- A server that evicts keys has taken its place.
    local size = redis.call('HSTRLEN', lock.messages, execution)
    redis.call('HDEL', lock.messages, execution)
    redis.call('HDEL', call.prefix .. 'parked', execution)
    Queue.count_parked(call, -1, 0 - size)
    return nil
  end
  return lock, waiter
end
