-- lib/claim: what a run asks for, and the places in queues that it has, or takes, meanwhile.

local Claim = {}

-- Another attempt of this run that lives, holding or waiting: for how many ms, what is known of it,
-- and whether it is in; nil if there is none.
function Claim.other_attempt(me)
  local left, text
  for _, lock in ipairs(me.locks) do
    local hold = lock.holds[me.run]
    if hold and hold.nonce ~= me.nonce and hold.nonce ~= Holds.KEPT and not left then
      left, text = hold.expiry - me.call.now, redis.call('HGET', lock.key, '@' .. me.run) or ''
    end
    local waiter = lock.queued and Queue.waiter(lock, me.run)
    if waiter and not waiter.parked and waiter.nonce ~= me.nonce and waiter.expiry > me.call.now then
      return waiter.expiry - me.call.now, waiter.inbox .. ' ' .. waiter.who, false
    end
  end
  return left, text, true
end

local function is_to_take_over(me, waiter)
  if waiter.parked then
    return not me.is_in
  end
  return me.asked and waiter.expiry <= me.call.now
end

-- The place of an attempt that died, or of a message that has arrived, goes on to this attempt
-- before the queue is cleared of the dead.
function Claim.take_over_places(me)
  -- The attempt that is in asks once more: what is parked then is a copy of it.
  me.is_in = Queue.is_in(me.locks, me.run)
  for _, lock in ipairs(me.locks) do
    local waiter = lock.queued and Queue.waiter(lock, me.run)
    if waiter and is_to_take_over(me, waiter) then
      waiter.nonce, waiter.inbox, waiter.who = me.nonce, me.inbox, me.who
      waiter.owner, waiter.by_owner = me.owner, me.by_owner
      waiter.channel = me.asked and me.asked.channel
      waiter.lease = me.lease
      waiter.life = me.asked and me.asked.wait or me.lease
      waiter.expiry = me.call.now + waiter.life
      waiter.lineage = waiter.parked and me.lineage
      -- An attempt that comes by a message is not the one that parked it.
      waiter.arrived = waiter.parked
      for _, each in ipairs(Queue.wanted(me.call, lock, waiter)) do
        Queue.write(me.call, each, me.run, waiter)
      end
    end
  end
end

local function names_of(locks)
  local names = {}
  for i, lock in ipairs(locks) do
    names[i] = lock.name
  end
  return names
end

-- A place is for one set of locks. Where the run now has one of them, or wants another set than
-- before, the old place goes: it would be granted beside the new one, or tickets would differ. So
-- does a message that was parked when the run still had other locks. The copy of a run that is in
-- stays, unless the run itself has to wait again.
function Claim.leave_other_places(me, locks)
  local names = table.concat(names_of(locks), '\0')
  local function leave(lock, waiter)
    local other = waiter and table.concat(waiter.names or { lock.name }, '\0') ~= names
    if other and not (waiter.parked and me.is_in and names == '') then
      Queue.leave(me.call, lock, me.run, waiter)
    end
  end
  leave(Parked.find(me.call, me.run))
  for _, lock in ipairs(me.locks) do
    leave(lock, lock.queued and Queue.waiter(lock, me.run))
  end
end

local function place_for(me, wanted)
  local asked = me.asked
  return {
    expiry = me.call.now + (asked.wait or me.lease),
    life = asked.wait or me.lease,
    lease = me.lease,
    nonce = me.nonce,
    owner = me.owner,
    channel = asked.channel,
    inbox = me.inbox,
    who = me.who,
    by_owner = me.by_owner,
    limits = wanted.limits,
    names = #wanted.locks > 1 and names_of(wanted.locks) or nil,
    stuck = asked.stuck,
  }
end

local function enter(me, wanted, waiter, before_all)
  -- A message that is parked already was perhaps for another broker, or had a time that is over.
  local lock, before = Parked.find(me.call, me.run)
  if lock then
    Queue.unpark(me.call, Queue.wanted(me.call, lock, before), me.run, before)
  end
  Queue.enter(me.call, wanted.locks, me.run, waiter, before_all)
  Deadlock.note(me.call, me.run, waiter, wanted.locks[1].name)
end

function Claim.wait(me, wanted)
  enter(me, wanted, place_for(me, wanted))
end

-- The first of these locks that has no room for one more message, and how many it has.
function Claim.full(me, locks)
  for _, lock in ipairs(locks) do
    local parked = redis.call('HLEN', lock.messages)
    if parked >= me.asked.most and redis.call('HEXISTS', lock.messages, me.run) == 0 then
      return lock, parked
    end
  end
  return nil
end

-- `is_copy`: of the run that is in. It stands where that one stood, before all who wait.
function Claim.park(me, wanted, is_copy)
  local asked, waiter = me.asked, place_for(me, wanted)
  waiter.parked, waiter.home, waiter.task = true, asked.home, asked.task
  waiter.deadline = asked.patience and me.call.now + asked.patience
  waiter.lineage = me.lineage
  enter(me, wanted, waiter, is_copy)
  Parked.keep(me.call, wanted.locks, me.run, waiter, asked.message)
  for _, lock in ipairs(wanted.locks) do
    lock.look = lock.look or math.huge
    Parked.schedule(me.call, lock)
  end
  Parked.settle(me.call, asked.home)
end
