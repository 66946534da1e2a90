-- lib/lines: the queues of lines (lock_order): calls in the order in which they were sent.

local Lines = {}

-- How the owner of a claim to a line begins whose message the broker delivers again if its process dies.
local COMES_AGAIN = 'again+'

-- Write a place that lives on, but no longer than its call, whose message the broker drops then.
local function live_on(call, lock, execution, waiter, life)
  local line = waiter.line
  line.ends = math.min(math.max(line.ends, call.now + life), line.expires or math.huge)
  Queue.write(call, lock, execution, waiter)
  Base.note_place(call.prefix, lock.name, execution, waiter, call.now)
end

-- Let in a call whose turn has come. Its fencing token is its ticket, which proves that no later call
-- overtook it; a call without a place got one when it came. If its message can come again, its place stays
-- in front until its execution has ended.
local function let_into_line(call, lock, execution, waiter, caller)
  local fence = string.format('%.0f', redis.call('ZSCORE', lock.queue, execution))
  local hears = execution == caller or Queue.notify(call, execution, waiter, fence)
  if not hears then
    return  -- its next heartbeat asks
  end
  local hold = {
    expiry = call.now + waiter.lease,
    fence = fence,
    attempt = waiter.attempt,
    owner = waiter.owner,
  }
  Holds.write(lock, execution, hold, waiter.inbox .. ' ' .. waiter.label)
  if not waiter.line or string.sub(waiter.owner, 1, #COMES_AGAIN) ~= COMES_AGAIN then
    Queue.leave(call, lock, execution, waiter)
    return
  end
  Queue.unpark(call, { lock }, execution, waiter)
  waiter.parked, waiter.arrived, waiter.turn = true, true, nil
  waiter.back, waiter.first, waiter.sent, waiter.by, waiter.untold = nil, nil, nil, nil, nil
  -- It can have stood here for longer than its place was to live.
  live_on(call, lock, execution, waiter, Base.DAY)
end

-- The most calls that were passed over to remember until somebody asks.
local TOLD = 1000

-- Messages that are missing side by side wait for one gap: the next one has been missing for as long, if a
-- call behind it was here by then. Not that of a retry, which has its own time (mind_the_broker), nor one
-- that had come: it comes again.
local function pass_on_turn(call, lock, waiter)
  local execution = redis.call('ZRANGE', lock.queue, 0, 0)[1]
  local next_one = execution and Queue.waiter(lock, execution)
  if not next_one or next_one.attempt ~= Base.KEPT or next_one.line.sent then
    return
  end
  if tonumber(next_one.line.ticket) < tonumber(waiter.later or 0) then
    next_one.turn, next_one.later = waiter.turn, waiter.later
    Queue.write(call, lock, execution, next_one)
  end
end

local function pass_over(call, lock, execution, waiter)
  local told = { lock.name, execution, waiter.label, call.now - waiter.turn }
  local passed = call.prefix .. 'passed'
  if redis.call('ZCARD', passed) < TOLD then
    redis.call('ZADD', passed, waiter.line.ticket, cjson.encode(told))
    redis.call('PEXPIRE', passed, Base.DAY)
  end
  Queue.leave(call, lock, execution, waiter)
  pass_on_turn(call, lock, waiter)
end

-- Whether a call behind the first place in the line waits in its process, or its message comes again: it
-- came, and is too large to be parked.
local function one_has_come(call, lock)
  for _, execution in ipairs(redis.call('ZRANGE', lock.queue, 1, Queue.MOST - 1)) do
    local waiter = Queue.waiter(lock, execution)
    if not Queue.gone(call, waiter) and waiter.attempt ~= Base.KEPT then
      return true
    end
  end
  return false
end

-- Since when the first place in the line keeps others waiting; nil if it keeps nobody waiting. Until a
-- later call is here, the broker can simply be behind.
local function turn_of(call, lock, waiter, caller)
  local is_waited_for = caller
    or redis.call('EXISTS', lock.messages) == 1
    or waiter.turn and one_has_come(call, lock)
  -- If the clock was set back, the time begins anew.
  return is_waited_for and math.min(waiter.turn or call.now, call.now) or nil
end

-- The ticket of a call that is here while the first place in the line keeps it waiting. Without a caller it
-- is the first whose message is here, or one before that.
local function ticket_of_later(call, lock, caller)
  if caller then
    -- Without a place it gets one behind all those that are due.
    return redis.call('ZSCORE', lock.queue, caller) or Base.next_fence(call.meta, call.micros)
  end
  local places, ticket = redis.call('ZRANGE', lock.queue, 0, Queue.MOST - 1, 'WITHSCORES'), nil
  for i = 1, #places, 2 do
    ticket = places[i + 1]
    if redis.call('HEXISTS', lock.messages, places[i]) == 1 then
      break
    end
  end
  return ticket
end

-- The place of a retry is older than its message. Until messages that were sent before have come, the
-- broker can be behind. `seen`: a message that comes a second time proves nothing.
local function mind_the_broker(lock, waiter, caller)
  local comes = waiter.line.sent and caller and (Queue.waiter(lock, caller) or {}).line
  local ticket, seen = comes and tonumber(comes.ticket) or 0, tonumber(waiter.line.seen or 0)
  if ticket > seen and ticket < tonumber(waiter.line.sent) then
    waiter.line.seen, waiter.turn = comes.ticket, nil
  end
end

-- The message of the first place in the line is awaited. True if the calls behind it wait for the message.
local function await(call, lock, execution, waiter, caller)
  mind_the_broker(lock, waiter, caller)
  local turn = turn_of(call, lock, waiter, caller)
  local late = turn and math.max(turn, waiter.line.due) + waiter.line.gap
  -- It was replaced, or cancelled.
  local is_over = Base.is_over(redis.call('GET', call.prefix .. 'd:' .. execution))
  if not is_over and Parked.find(call, execution) then
    -- It came, and is parked for its lock.
    waiter.turn = nil
    live_on(call, lock, execution, waiter, 2 * Base.DAY)
    return true
  elseif is_over or waiter.line.ends <= call.now then
    Queue.leave(call, lock, execution, waiter)
    return false
  elseif late and late <= call.now and waiter.turn then
    pass_over(call, lock, execution, waiter)
    return false
  end
  if turn ~= waiter.turn then
    waiter.turn, waiter.later = turn, turn and ticket_of_later(call, lock, caller)
    Queue.write(call, lock, execution, waiter)
  end
  lock.look = math.min(lock.look, late or math.huge, waiter.line.ends + 1)
  return true
end

-- Whether a caller without a place goes before the first call in the line, as that is not due yet.
local function goes_before(call, lock, waiter, caller)
  return caller and waiter.line.due > call.now and not redis.call('ZSCORE', lock.queue, caller)
end

-- Let in the first call of a line, or hand out its message; only a call whose message is late is passed
-- over. True if the caller has to wait.
function Lines.serve(call, lock, caller)
  for _ = 1, Queue.MOST do
    local execution = redis.call('ZRANGE', lock.queue, 0, 0)[1]
    if not execution then
      return false
    end
    local waiter = Queue.waiter(lock, execution)
    if Holds.permits(lock) > 0 then
      return execution ~= caller
    elseif Queue.gone(call, waiter) then
      Queue.leave(call, lock, execution, waiter)
    elseif execution == caller or not waiter.parked then
      let_into_line(call, lock, execution, waiter, caller)
      return execution ~= caller
    elseif Queue.is_awaited(lock, execution, waiter) then
      if goes_before(call, lock, waiter, caller) then
        return false
      elseif await(call, lock, execution, waiter, caller) then
        return true
      end
    elseif Parked.send(call, lock, execution, waiter) then
      lock.look = math.min(lock.look, waiter.back)
      return true
    end
  end
  return true
end

-- Leave the hold of a line to a retry, or to the execution's own message that comes again: what it gets is
-- the place. Those behind wait for its message as for any late one.
function Lines.succeed(call, lock, execution, hold, label, gap)
  -- The owner is the task, after `again+` if its message comes again.
  local ticket, task = hold.fence, string.match(hold.owner, '[^+]*$')
  local line = { ticket = ticket, gap = gap, due = 0, ends = 0 }
  line.sent = string.format('%.0f', call.micros)
  -- The retry can have been quicker, and wait behind all others.
  local waiter = Queue.waiter(lock, execution)
  line.expires = waiter and waiter.line and waiter.line.expires
  waiter = waiter or Base.awaited(string.match(label, ' (.*)$') or '', task, line)
  waiter.line, waiter.turn, waiter.task = line, nil, task
  redis.call('ZADD', lock.queue, ticket, execution)
  live_on(call, lock, execution, waiter, gap + Base.DAY)
end

return Lines
