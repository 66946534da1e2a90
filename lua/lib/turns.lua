-- lib/turns: whose turn it is: who of those that wait enters, or is sent on, next.

local Turns = {}

-- How many ahead of a run in the queue are about to come back and to take an entry; nil if one is
-- ahead that lets nobody pass.
local function promised_ahead(call, lock, run)
  local promised = 0
  for i = 0, Queue.MOST - 1 do
    local other = redis.call('ZRANGE', lock.queue, i, i)[1]
    if other == run then
      return promised
    end
    local waiter = other and Queue.waiter(lock, other)
    if not waiter then
      return nil
    end
    if not Queue.behind_itself(call, lock, other, waiter) then
      if not Parked.on_its_way(call, waiter) then
        return nil
      end
      promised = promised + Parked.promise(call, lock, other, waiter)
    end
  end
  return nil
end

-- What a waiter may have now: for each of its locks the fence of the entry that it joins, or false
-- for an entry of its own; nil while a lock is not to be had. Where it does not join it has to be
-- first in the queue; `head` is the lock where the caller has seen to that.
local function admission(call, lock, run, waiter, head)
  local fences = {}
  for i, each in ipairs(Queue.wanted(call, lock, waiter)) do
    fences[i] = Queue.entry_of(each, run, waiter) or false
    if not fences[i] then
      local promised = each == head and lock.promised - (waiter.parked and 0 or lock.late)
        or promised_ahead(call, each, run)
      if not promised or each.entries + promised >= waiter.limits[i] then
        return nil
      end
    end
  end
  return fences
end

-- No receiver: the process is gone, or for now not connected. pcall: a server that forbids the
-- channel answers with an error; then the heartbeat finds the grant.
local function reached(call, run, waiter, fences)
  local message = table.concat({ 'granted', run, waiter.nonce, unpack(fences) }, ' ')
  return publish(call.prefix .. 'i:' .. (waiter.channel or waiter.inbox), message) ~= 0
end

-- The hold's first lease is what is left of the waiter's: a waiter that has died meanwhile, and all
-- the dead behind it, hold up the others for one waiter's lease in total. False: it could not be
-- told and keeps its place. The run that asks now needs no message, the reply tells it.
local function let_in(call, lock, run, waiter, fences, caller)
  local fence
  for i, joined in ipairs(fences) do
    fence = fence or not joined and Base.next_fence(call.meta, call.micros)
    fences[i] = joined or fence
  end
  if run ~= caller and not reached(call, run, waiter, fences) then
    return false
  end
  Queue.leave(call, lock, run, waiter)
  for i, each in ipairs(Queue.wanted(call, lock, waiter)) do
    local hold = { expiry = waiter.expiry, fence = fences[i], nonce = waiter.nonce, owner = waiter.owner }
    Holds.write(each, run, hold, waiter.inbox .. ' ' .. waiter.who)
  end
  return true
end

-- True: it needs its place no longer.
local function enter_or_send(call, lock, run, waiter, fences, caller)
  if not fences then
    return false
  end
  if not waiter.parked or run == caller then
    return let_in(call, lock, run, waiter, fences, caller)
  end
  return not Parked.on_its_way(call, waiter) and not Parked.hand_out(call, lock, run, waiter)
end

-- Queued runs of an owner that is in now, if they may enter by owner: they join its entry.
function Turns.join(call, lock, owner, caller)
  for _, run in ipairs(redis.call('ZRANGE', lock.queue, 0, Queue.MOST - 1)) do
    local waiter = Queue.waiter(lock, run)
    local joins = waiter and waiter.by_owner and waiter.owner == owner
    if joins and not Queue.gone(call, waiter) and not Queue.behind_itself(call, lock, run, waiter) then
      enter_or_send(call, lock, run, waiter, admission(call, lock, run, waiter), caller)
    end
  end
end

-- A waiter that asks whether its owner is in by now. Only those that can be reached are let in with
-- their owner at once, and only with one that also enters by owner.
function Turns.rejoin(call, lock, run, waiter)
  local fences = (waiter.by_owner or Holds.kept(lock, run)) and admission(call, lock, run, waiter)
  if fences then
    let_in(call, lock, run, waiter, fences, run)
  end
end

-- A run that waits already when a hold is kept for it: it was quicker than the one before it.
function Turns.inherit(call, lock, heir)
  local waiter = Queue.waiter(lock, heir)
  if waiter and not Queue.gone(call, waiter) then
    enter_or_send(call, lock, heir, waiter, admission(call, lock, heir, waiter), nil)
  end
end

-- Nobody is in, and who was sent on does not come: perhaps there is one behind that is here.
local function may_be_passed(lock, run, waiter, caller)
  return waiter.parked and run ~= caller and lock.late > 0 and lock.entries == 0
end

-- Let the first in line enter, or hand out its message. True: somebody who is to enter before the
-- caller still waits, so the caller has to queue, or to stay there. `lock.promised` counts those who
-- are about to come back ahead of it. `caller` is the run that asks now.
local function serve(call, lock, caller)
  local passed, held_up = 0, false
  for _ = 1, Queue.MOST do
    local run = redis.call('ZRANGE', lock.queue, passed, passed)[1]
    if not run then
      return held_up
    end
    local waiter = Queue.waiter(lock, run)
    if Queue.gone(call, waiter) then
      Queue.leave(call, lock, run, waiter)
    elseif waiter.parked and Parked.pass(call, lock, run, waiter, caller) then
      passed = passed + 1
    else
      local fences = admission(call, lock, run, waiter, lock)
      if not fences then
        if not may_be_passed(lock, run, waiter, caller) then
          return run ~= caller
        end
        passed, held_up = passed + 1, true
      elseif not enter_or_send(call, lock, run, waiter, fences, caller) then
        passed = passed + 1
        Parked.count(call, lock, run, waiter)
      elseif waiter.by_owner then
        for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
          Turns.join(call, each, waiter.owner, caller)
        end
      end
    end
  end
  return true
end

function Turns.promote(call, lock, caller)
  lock.promised, lock.late, lock.look = 0, 0, math.huge
  local ahead = serve(call, lock, caller)
  Parked.schedule(call, lock)
  return ahead
end

-- A parked run leaves for good, and those behind it move up. False: it is not parked.
function Turns.withdraw(call, run)
  local lock, waiter = Parked.find(call, run)
  if not lock then
    return false
  end
  Queue.leave(call, lock, run, waiter)
  for _, each in ipairs(Queue.wanted(call, lock, waiter)) do
    if redis.call('EXISTS', each.queue) == 1 then
      Turns.promote(call, each)
    end
  end
  return true
end
