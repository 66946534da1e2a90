-- lib/claim: the claim of an execution, and its places in queues.

local Claim = {}

-- Another live attempt of this execution: for how many ms it lives, its label, and whether it holds the
-- lock rather than waits; nil if there is none.
function Claim.other_attempt(me)
  local left, text
  for _, lock in ipairs(me.locks) do
    local hold = lock.holds[me.execution]
    if not left and Holds.has(lock, me.execution) and hold.attempt ~= me.attempt then
      left, text = hold.expiry - me.call.now, redis.call('HGET', lock.key, '@' .. me.execution) or ''
    end
    local waiter = lock.queued and Queue.waiter(lock, me.execution)
    if waiter and not waiter.parked and waiter.attempt ~= me.attempt and waiter.expiry > me.call.now then
      return waiter.expiry - me.call.now, waiter.inbox .. ' ' .. waiter.label, false
    end
  end
  return left, text, true
end

-- The lock and the place where the execution is parked, if it was when the call began.
local function parked_place(me)
  if me.is_parked then
    return Parked.find(me.call, me.execution)
  end
  return nil
end

-- The lock for which this very attempt has parked its message, if the message has not come back since. What
-- asks now is a late copy of the attempt's command, and must acquire nothing: nobody hears the reply.
function Claim.parked_by_this_attempt(me)
  for _, lock in ipairs(me.locks) do
    local waiter = lock.queued and Queue.waiter(lock, me.execution)
    if waiter and waiter.parked and waiter.attempt == me.attempt and not waiter.arrived then
      return lock
    end
  end
  return nil
end

-- Whether a place or this claim is in a line: an execution can have a place in a line and another in the
-- queue of a lock (lib/lines).
local function is_in_line(me, lock)
  return Holds.is_line(lock) or Holds.is_line(me.locks[1])
end

local function names_of(locks)
  local names = {}
  for i, lock in ipairs(locks) do
    names[i] = lock.name
  end
  return names
end

-- The locks that this attempt does not hold, with the limit of each.
function Claim.missing(me)
  local missing = { locks = {}, limits = {} }
  for i, lock in ipairs(me.locks) do
    if not Holds.has(lock, me.execution) then
      table.insert(missing.locks, lock)
      table.insert(missing.limits, me.limits[i])
    end
  end
  return missing
end

-- Whether a place is for these locks: a callable can name others than before, and so can a deploy.
local function is_for(lock, waiter, locks)
  return table.concat(waiter.names or { lock.name }, '\0') == table.concat(names_of(locks), '\0')
end

local function is_to_take_over(me, waiter)
  if waiter.parked then
    -- Its place is one for all its locks: at the others it is this attempt's by now.
    return waiter.attempt ~= me.attempt
  end
  return me.asked and waiter.expiry <= me.call.now
end

-- An execution that has come back for other locks must acquire none of the old ones meanwhile.
local function note_leaving(me, missing)
  local lock, waiter = parked_place(me)
  if lock and not is_in_line(me, lock) and not is_for(lock, waiter, missing.locks) then
    me.call.leaving = me.execution
  end
end

-- Give this attempt the place of an attempt that died, or of its message that has arrived, before dead
-- places are removed from the queue.
function Claim.take_over_places(me)
  -- If this attempt holds the lock already, a parked message is a copy of its own.
  me.holds = Queue.holds_any(me.locks, me.execution)
  local missing = Claim.missing(me)
  note_leaving(me, missing)
  for _, lock in ipairs(me.locks) do
    local waiter = lock.queued and Queue.waiter(lock, me.execution)
    if waiter and is_to_take_over(me, waiter) and is_for(lock, waiter, missing.locks) then
      waiter.attempt, waiter.inbox, waiter.label = me.attempt, me.inbox, me.label
      waiter.owner, waiter.by_owner = me.owner, me.by_owner
      waiter.lease = me.lease
      -- The declaration of the task can have changed since: the limits are those of this attempt.
      waiter.limits = missing.limits
      waiter.life = me.asked and me.asked.wait or me.lease
      waiter.expiry = me.call.now + waiter.life
      waiter.ancestors = me.ancestors
      -- The attempt that comes with a message is another than the one that parked it.
      waiter.arrived = waiter.parked
      Queue.write_all(me.call, lock, me.execution, waiter)
    end
  end
end

-- Leave the places for another set of locks than these, with the messages parked there: else both places
-- would be granted, or their tickets would differ. The copy of an execution that holds the lock stays,
-- unless the execution has to wait again.
function Claim.leave_other_places(me, locks)
  local function leave(lock, waiter)
    if lock and is_in_line(me, lock) then
      return
    end
    local other = waiter and not is_for(lock, waiter, locks)
    if other and not (waiter.parked and me.holds and #locks == 0) then
      Queue.leave(me.call, lock, me.execution, waiter)
      table.insert(me.call.to_promote, lock)
    end
  end
  leave(parked_place(me))
  for _, lock in ipairs(me.locks) do
    leave(lock, lock.queued and Queue.waiter(lock, me.execution))
  end
end

local function place_for(me, wanted)
  local asked = me.asked
  return {
    expiry = me.call.now + (asked.wait or me.lease),
    life = asked.wait or me.lease,
    lease = me.lease,
    attempt = me.attempt,
    owner = me.owner,
    inbox = me.inbox,
    label = me.label,
    by_owner = me.by_owner,
    ancestors = me.ancestors,
    limits = wanted.limits,
    names = #wanted.locks > 1 and names_of(wanted.locks) or nil,
    stuck = asked.stuck,
  }
end

local function enter(me, wanted, waiter, before_all)
  -- An older parked message can be for another broker, or its patience can be over.
  local lock, before = parked_place(me)
  if lock then
    Queue.unpark(me.call, Queue.wanted(me.call, lock, before), me.execution, before)
  end
  if waiter.parked then
    -- Before its place: keys with parked messages live without end.
    Parked.keep(me.call, wanted.locks, me.execution, waiter, me.asked.message)
  end
  Queue.enter(me.call, wanted.locks, me.execution, waiter, before_all or me.passes)
  if waiter.stuck then
    Deadlock.note(me.call, me.execution, waiter, wanted.locks[1].name)
  end
end

function Claim.wait(me, wanted)
  enter(me, wanted, place_for(me, wanted))
end

-- The index of the first of these locks without room for another message, and how many messages it has;
-- or 0, with the number and the bytes of all messages of the bucket, if these leave no room.
function Claim.full(me, locks)
  local asked = me.asked
  for _, lock in ipairs(locks) do
    local parked = redis.call('HLEN', lock.messages)
    if parked >= asked.most and redis.call('HEXISTS', lock.messages, me.execution) == 0 then
      return { lock.index_of_claim, parked, 0 }
    end
  end
  local all = redis.call('HMGET', me.call.meta, 'parked', 'bytes')
  local parked, bytes = tonumber(all[1] or 0), tonumber(all[2] or 0)
  local is_over = parked >= asked.most_in_all or bytes + #asked.message > asked.most_bytes
  if is_over and redis.call('HEXISTS', me.call.prefix .. 'parked', me.execution) == 0 then
    return { 0, parked, bytes }
  end
  return nil
end

-- `before_all`: the execution holds the lock. This copy of it stands where it stood, before all waiters.
function Claim.park(me, wanted, before_all)
  local asked, waiter = me.asked, place_for(me, wanted)
  waiter.parked, waiter.home, waiter.task, waiter.call = true, asked.home, asked.task, asked.call
  waiter.is_copy = asked.is_copy or nil
  waiter.deadline = asked.patience and me.call.now + asked.patience
  enter(me, wanted, waiter, before_all)
  for _, lock in ipairs(wanted.locks) do
    lock.look = lock.look or math.huge
    Parked.schedule(me.call, lock)
  end
end

return Claim
