-- lib/turns: whose turn it is: which waiter gets the lock next, or which parked message is resumed.

local Turns = {}

local function nothing_promised(ahead)
  ahead.promised, ahead.soon = { exclusive = 0, shared = 0 }, { exclusive = 0, shared = 0 }
  ahead.look = math.huge
  return ahead
end

-- How many permits the waiters ahead of an execution in the queue will need, as fields of a lock say it; nil if
-- one of them cannot be passed.
local function promised_ahead(call, lock, execution, me)
  local ahead = nothing_promised({})
  Queue.restore(call, lock, execution, me)
  for i = 0, Queue.MOST - 1 do
    local other = redis.call('ZRANGE', lock.queue, i, i)[1]
    if other == execution then
      return ahead
    end
    local waiter = other and Queue.waiter(lock, other)
    if not waiter then
      return nil
    end
    local counts = not Queue.is_to_pass_by(call, lock, other, waiter)
    if counts and not Queue.behind_itself(call, lock, other, waiter) then
      if not Parked.on_its_way(call, waiter) then
        return nil
      end
      Parked.count(call, lock, other, waiter, ahead)
    end
  end
  return nil
end

-- Whether a lock has room for a waiter and for those ahead of it in the queue.
local function has_room(call, lock, execution, waiter, limit, is_head)
  local ahead = lock
  if not is_head then
    ahead = promised_ahead(call, lock, execution, waiter)
  end
  if ahead and Queue.is_burst(lock) and waiter.sent then
    return ahead.promised.exclusive == 0  -- its own pause is over: the one that is there is a newer burst's
  end
  -- A late execution can be passed while the lock is free; but not by sharers, which could come one after
  -- another.
  local waits_for_late = waiter.parked or limit == Holds.SHARED and Holds.readers(lock)
  return ahead and not Holds.is_full(lock, limit, waits_for_late and ahead.promised or ahead.soon)
end

-- What a waiter can have now: for each of its locks the token of the permit to join, or false for a new
-- permit; nil while one of the locks is not free. To get a new permit, or to share a lock that it has not
-- joined before, a waiter must be first in the queue; at the lock `head` the caller has made sure of that.
local function admission(call, lock, execution, waiter, head)
  local fences = {}
  for i, each in ipairs(Queue.wanted(call, lock, waiter)) do
    local limit = waiter.limits[i]
    fences[i] = Holds.permit_of(each, execution, waiter, limit) or false
    if not fences[i] then
      if not has_room(call, each, execution, waiter, limit, each == head) then
        return nil
      end
      fences[i] = limit == Holds.SHARED and Holds.readers(each) or false
    end
  end
  return fences
end

-- Whether a waiter that was not reached has been passed over for as long as its place lives without a
-- heartbeat. The place of a dead one has lapsed by then. This one lives and cannot be reached: who is never
-- served by others has to beat all newcomers to a free lock, and may never get it.
local function is_unheard_for_long(call, lock, execution, waiter)
  -- If the clock was set back, the time begins anew.
  local since = math.min(waiter.unheard or call.now, call.now)
  if since ~= waiter.unheard then
    waiter.unheard = since
    Queue.write_all(call, lock, execution, waiter)
  end
  return call.now - since >= waiter.life
end

-- Grant a waiter its locks, with their whole lease from now: the waiter can be slow to notice. False if
-- the waiter could not be notified: it keeps its place. The execution of this call (`caller`) gets the
-- reply, and no message.
local function let_in(call, lock, execution, waiter, fences, caller)
  local fence
  for i, joined in ipairs(fences) do
    fence = fence or not joined and Base.next_fence(call.meta, call.micros)
    fences[i] = joined or fence
  end
  local lease = waiter.lease
  if execution ~= caller and not Queue.notify(call, execution, waiter, fences[1]) then
    if not is_unheard_for_long(call, lock, execution, waiter) then
      return false
    end
    -- Its next heartbeat finds the hold, and extends it. If it died just now, others wait no longer for it.
    lease = waiter.life
  end
  Queue.leave(call, lock, execution, waiter)
  for i, each in ipairs(Queue.wanted(call, lock, waiter)) do
    local hold = {
      expiry = call.now + lease,
      fence = fences[i],
      attempt = waiter.attempt,
      owner = waiter.owner,
      shared = waiter.limits[i] == Holds.SHARED,
    }
    Holds.write(each, execution, hold, waiter.inbox .. ' ' .. waiter.label)
  end
  return true
end

-- Let a waiter in, or hand out its message. True if it no longer needs its place.
local function enter_or_send(call, lock, execution, waiter, fences, caller)
  if not fences then
    return false
  end
  if not waiter.parked or execution == caller then
    return let_in(call, lock, execution, waiter, fences, caller)
  end
  return not Parked.send(call, lock, execution, waiter)
end

-- Serve a waiter that may be in a permit by now, wherever it stands in the queue.
local function serve_one(call, lock, execution, waiter, caller)
  if not Queue.gone(call, waiter) and not Queue.behind_itself(call, lock, execution, waiter) then
    Holds.claim_kept(lock, execution, Holds.limit_of(lock, waiter))
    enter_or_send(call, lock, execution, waiter, admission(call, lock, execution, waiter), caller)
  end
end

-- Let waiters of an owner that has just acquired the lock join its permit, if they can re-enter by owner.
function Turns.join(call, lock, owner, caller)
  for _, execution in ipairs(redis.call('ZRANGE', lock.queue, 0, Queue.MOST - 1)) do
    local waiter = Queue.waiter(lock, execution)
    local joins = waiter and waiter.by_owner and waiter.owner == owner
    if joins and not Queue.is_to_pass_by(call, lock, execution, waiter) then
      serve_one(call, lock, execution, waiter, caller)
    end
  end
end

-- The same, and where it has left.
function Turns.serve_one(call, lock, execution, caller)
  serve_one(call, lock, execution, Queue.waiter(lock, execution), caller)
  Turns.promote_others(call, caller)
end

-- Whether nobody holds the lock and a resumed execution is late: then a waiter behind it can have the lock.
local function may_be_passed(lock, execution, waiter, caller)
  local promised, soon = lock.promised, lock.soon
  local is_one_late = promised.exclusive > soon.exclusive or promised.shared > soon.shared
  return waiter.parked and execution ~= caller and is_one_late and Holds.permits(lock) == 0
end

-- Grant the lock to the first in the queue, or hand out its message, and so on. True if the caller has to
-- wait: somebody whose turn comes before the caller's still waits. `caller` is the execution of this call;
-- `lock.promised` counts the permits of messages ahead of it that are on their way.
local function serve(call, lock, caller)
  local passed, held_up = 0, false
  for _ = 1, Queue.MOST do
    local execution = redis.call('ZRANGE', lock.queue, passed, passed)[1]
    if not execution then
      return held_up
    end
    local waiter = Queue.waiter(lock, execution)
    if Queue.is_to_pass_by(call, lock, execution, waiter) then
      passed = passed + 1
    elseif Queue.gone(call, waiter) then
      Queue.leave(call, lock, execution, waiter)
    elseif waiter.parked and Parked.may_look_behind(call, lock, execution, waiter, caller) then
      passed = passed + 1
    else
      local fences = admission(call, lock, execution, waiter, lock)
      if not fences then
        if not may_be_passed(lock, execution, waiter, caller) then
          return execution ~= caller
        end
        passed, held_up = passed + 1, true
      elseif not enter_or_send(call, lock, execution, waiter, fences, caller) then
        passed = passed + 1
        Parked.count(call, lock, execution, waiter, lock)
      elseif waiter.by_owner then
        for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
          Turns.join(call, each, waiter.owner, caller)
        end
      end
    end
  end
  return true
end

local function promote(call, lock, caller)
  if redis.call('EXISTS', lock.queue) == 0 then
    return false
  end
  nothing_promised(lock)
  local ahead = (Holds.is_line(lock) and Lines.serve or serve)(call, lock, caller)
  if redis.call('EXISTS', lock.messages) == 1 or Holds.is_line(lock) then
    Parked.schedule(call, lock)
  end
  return ahead
end

-- Promote where waiters for several locks have left.
function Turns.promote_others(call, caller)
  for _ = 1, Queue.MOST do
    local lock = table.remove(call.to_promote, 1)
    if not lock then
      return
    end
    promote(call, lock, caller)
  end
end

-- Let waiters in, or hand out their messages, here and where one that was let in has left. True if the
-- caller has to wait.
function Turns.promote(call, lock, caller)
  local ahead = promote(call, lock, caller)
  Turns.promote_others(call, caller)
  return ahead
end

-- Remove a parked execution, or the place of a call whose message is awaited, for good, and let the waiters
-- behind it move up. False if there is none.
function Turns.withdraw(call, execution)
  local lock, waiter = Parked.find(call, execution)
  if not lock then
    lock, waiter = Parked.awaited(call, execution)
    -- Not if it runs: its message can come again.
    if not lock or lock.holds[execution] then
      return false
    end
  end
  Queue.leave(call, lock, execution, waiter)
  Turns.promote(call, lock)
  if Queue.is_burst(lock) and lock.holds.pause and redis.call('EXISTS', lock.queue) == 0 then
    Holds.drop(lock, 'pause')  -- nobody is left for whom it was made
  end
  return true
end

return Turns
