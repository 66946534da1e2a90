-- lib/queue: the places of waiters, in the order of their tickets.

local Queue = {}

-- What the fields of a waiter mean: lua/README.md, "Fields of a queue", "Parked executions" and "Lines".

-- The most places that a call works through, so that no call stalls the server. The next heartbeat, or
-- look at parked messages, goes on from there.
Queue.MOST = 256

function Queue.waiter(lock, execution)
  local waiter = Base.decoded(redis.call('HGET', lock.waiters, execution))
  -- The clock was set back, as for Base.bound.
  if waiter and not waiter.parked and waiter.expiry > lock.now + waiter.life then
    waiter.expiry = lock.now + waiter.life
    redis.call('HSET', lock.waiters, execution, cjson.encode(waiter))
  end
  return waiter
end

-- A parked execution has no process that could die: its place stays until the message comes back.
function Queue.gone(call, waiter)
  return not waiter or not waiter.parked and waiter.expiry <= call.now
end

-- The lock of a task's debounced calls: its waiters are bursts, and nobody acquires it.
function Queue.is_burst(lock)
  return string.sub(lock.name, 1, 9) == 'debounce\t'
end

-- Whether the message of a place in a line has not come yet.
function Queue.is_awaited(lock, execution, waiter)
  return waiter.line and redis.call('HEXISTS', lock.messages, execution) == 0
end

-- Without parked messages a line lives until a day after its last place is due.
local function outlive_places(call, lock)
  local last = tonumber(redis.call('ZREVRANGE', lock.queue, 0, 0, 'WITHSCORES')[2] or 0)
  local life = math.max(math.floor(last / 1000) - call.now, 0) + Base.DAY + Base.GRACE
  redis.call('PEXPIRE', lock.queue, life)
  redis.call('PEXPIRE', lock.waiters, life)
end

-- All the locks that a waiter of this lock wants.
function Queue.wanted(call, lock, waiter)
  local locks = {}
  for i, name in ipairs(waiter.names or { lock.name }) do
    local key = call.prefix .. 'l:' .. name
    locks[i] = key == lock.key and lock or Holds.open(call, key)
  end
  return locks
end

-- Whether to pass a waiter by, whoever looks along a queue: it is to leave this place for another; or the
-- key of one of its locks is foreign, which must not keep anybody else from the others.
function Queue.is_to_pass_by(call, lock, execution, waiter)
  local is_readable = not waiter or not waiter.names or pcall(Queue.wanted, call, lock, waiter)
  return execution == call.leaving or not is_readable
end

-- Forget the message of a parked execution. Its places in the queues stay.
function Queue.unpark(call, locks, execution, waiter)
  if not waiter or not waiter.parked or Queue.is_awaited(locks[1], execution, waiter) then
    return
  end
  local size = redis.call('HSTRLEN', locks[1].messages, execution)
  for _, lock in ipairs(locks) do
    redis.call('HDEL', lock.messages, execution)
    if redis.call('EXISTS', lock.messages) == 0 and Holds.is_line(lock) then
      outlive_places(call, lock)
    elseif redis.call('EXISTS', lock.messages) == 0 then
      -- The heartbeat of a waiter in a process makes this longer again.
      redis.call('PEXPIRE', lock.queue, Base.GRACE)
      redis.call('PEXPIRE', lock.waiters, Base.GRACE)
      redis.call('ZREM', call.prefix .. 'due', 'l ' .. lock.name)
    end
  end
  redis.call('ZREM', call.prefix .. 'due', 'r ' .. execution)
  redis.call('ZREM', call.prefix .. 'owed:' .. waiter.home, execution)
  Queue.forget_parked(call, execution, waiter.task, size)
end

-- Forget where an execution is parked; `task` is nil if its place is gone.
function Queue.forget_parked(call, execution, task, size)
  local parked = call.prefix .. 'parked'
  local was_parked = redis.call('HDEL', parked, execution)
  -- Another execution of the task can be parked by now: a retry, while this is an old copy.
  if task and redis.call('HGET', parked, '#' .. task) == execution then
    redis.call('HDEL', parked, '#' .. task)
  end
  if was_parked == 1 then
    Queue.count_parked(call, -1, 0 - size)  -- `-size` can be -0, which Redis refuses
  end
end

-- Count the parked messages of this bucket and their bytes, for the bounds. Without parked messages the
-- counts are zero, whatever a server that evicts keys has deleted.
function Queue.count_parked(call, messages, bytes)
  if redis.call('EXISTS', call.prefix .. 'parked') == 0 then
    redis.call('HDEL', call.meta, 'parked', 'bytes')
  else
    redis.call('HINCRBY', call.meta, 'parked', messages)
    redis.call('HINCRBY', call.meta, 'bytes', bytes)
  end
end

function Queue.leave(call, lock, execution, waiter)
  local wanted = waiter and Queue.wanted(call, lock, waiter) or { lock }
  for _, each in ipairs(wanted) do
    redis.call('ZREM', each.queue, execution)
    redis.call('HDEL', each.waiters, execution)
    if #wanted > 1 then
      table.insert(call.to_promote, each)  -- it can have held up others there
    end
  end
  if waiter and waiter.stuck then
    Deadlock.forget(call, execution, waiter)
  end
  Queue.unpark(call, wanted, execution, waiter)
  if Holds.is_line(lock) and redis.call('EXISTS', lock.queue) == 0 then
    redis.call('ZREM', call.prefix .. 'due', 'l ' .. lock.name)
  end
  if waiter and waiter.line then
    redis.call('DEL', call.prefix .. 'sent:' .. execution)
    -- Another call can have the task's id by now: a retry.
    local sent = call.prefix .. 'sent:#' .. waiter.task
    if redis.call('GET', sent) == execution then
      redis.call('DEL', sent)
    end
  end
end

function Queue.write(call, lock, execution, waiter)
  redis.call('HSET', lock.waiters, execution, cjson.encode(waiter))
  if redis.call('EXISTS', lock.messages) == 1 then
    redis.call('PERSIST', lock.waiters)
    redis.call('PERSIST', lock.queue)
  else
    local ends = waiter.line and waiter.line.ends or waiter.expiry
    Base.outlive(ends - call.now, lock.queue, lock.waiters)
  end
end

-- Write a waiter at all the locks that it wants.
function Queue.write_all(call, lock, execution, waiter)
  for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
    Queue.write(call, each, execution, waiter)
  end
end

local function ticket_behind_all(call, locks)
  if Holds.is_line(locks[1]) then
    return Base.next_fence(call.meta, call.micros)  -- in front of those that are due later
  end
  local ticket = call.micros
  for _, lock in ipairs(locks) do
    local last = redis.call('ZREVRANGE', lock.queue, 0, 0, 'WITHSCORES')
    ticket = math.max(ticket, tonumber(last[2] or 0) + 1)
  end
  return ticket
end

local function ticket_before_all(call, locks)
  local ticket = call.micros
  for _, lock in ipairs(locks) do
    local first = redis.call('ZRANGE', lock.queue, 0, 0, 'WITHSCORES')
    ticket = math.min(ticket, tonumber(first[2] or ticket) - 1)
  end
  return ticket
end

-- The ticket that an execution has already: its command is repeated, or a new attempt replaces a dead one.
local function ticket_of(locks, execution)
  for _, lock in ipairs(locks) do  -- not the first alone: its place can have been evicted
    local ticket = redis.call('ZSCORE', lock.queue, execution)
    if ticket then
      return tonumber(ticket)
    end
  end
  return nil
end

-- An execution has one ticket for all the locks that it wants. So the order is the same in all queues, and
-- two executions that want A,B and B,A cannot wait for each other.
function Queue.enter(call, locks, execution, waiter, before_all)
  local kept = ticket_of(locks, execution)
  local ticket = kept or (before_all and ticket_before_all or ticket_behind_all)(call, locks)
  for _, lock in ipairs(locks) do
    local is_line = Holds.is_line(lock)
    local before = (kept or is_line) and Queue.waiter(lock, execution) or {}
    if before.stuck then
      Deadlock.forget(call, execution, before)
    end
    -- The message has come to the place reserved for it, or gets a new place.
    if is_line then
      waiter.line, waiter.task = before.line, waiter.task or before.task
      waiter.came = before.came or call.now
    end
    redis.call('ZADD', lock.queue, string.format('%.0f', ticket), execution)
    Queue.write(call, lock, execution, waiter)
  end
end

-- Restore the place of a waiter for several locks at one of them, if a server that evicts keys, or somebody
-- else, has deleted it there: without it the waiter would keep others waiting at the other locks for ever.
function Queue.restore(call, lock, execution, waiter)
  if not waiter.names or redis.call('ZSCORE', lock.queue, execution) then
    return
  end
  for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
    local ticket = redis.call('ZSCORE', each.queue, execution)
    if ticket then
      redis.call('ZADD', lock.queue, ticket, execution)
      Queue.write(call, lock, execution, waiter)
      return
    end
  end
end

-- Notify a waiter of its grant. False if nobody listens: the process is gone, or not connected for now.
-- A server that cannot write stops the script before the message is sent: the waiter would work without a
-- hold. (A grant that joins a permit has written nothing so far.)
function Queue.notify(call, execution, waiter, fence)
  Base.write_without_memory(call.prefix)
  local message = table.concat({ 'granted', execution, waiter.attempt, fence }, ' ')
  return publish(call.prefix .. 'i:' .. waiter.inbox, message) ~= 0
end

-- Whether an execution holds one of these locks.
function Queue.holds_any(locks, execution)
  for _, lock in ipairs(locks) do
    if Holds.has(lock, execution) then
      return true
    end
  end
  return false
end

-- Whether a parked message is a copy of an execution that holds the lock: its turn comes if that
-- execution dies.
function Queue.behind_itself(call, lock, execution, waiter)
  return waiter.parked and Queue.holds_any(Queue.wanted(call, lock, waiter), execution)
end

return Queue
