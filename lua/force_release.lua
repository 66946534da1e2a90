-- force_release: Release a lock by force, notify its holders, and let the next waiters in; a line goes on without the call it waits for.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] lock: hash, the holds of the lock
-- ARGV[1] execution: id, only this execution's hold; empty releases all
-- Reply {{execution, fence, owner, label}, …}: the holds that were released, or the place whose message a line waited for
-- Keeps: a holder that loses its hold is notified at once; the next waiters get in
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/lines, lib/turns

local meta, key = KEYS[1], KEYS[2]
local only = ARGV[1]
local call = Base.begin(meta)
Base.write_without_memory(call.prefix)
local lock = Holds.open(call, key)

local reply = {}
local holds = only == '' and Holds.some(lock, math.huge) or { [only] = lock.holds[only] or nil }
for execution, hold in pairs(holds) do
  local label = redis.call('HGET', key, '@' .. execution) or ''
  reply[#reply + 1] = { execution, hold.fence, hold.owner, label }
  local inbox = call.prefix .. 'i:' .. string.match(label, '^(%S*)')
  publish(inbox, table.concat({ 'lost', execution, hold.attempt }, ' '))
end

-- The place of a call whose message is to come, or comes again. If it comes, it runs out of order.
local function leave_line(execution)
  local waiter = Holds.is_line(lock) and Queue.waiter(lock, execution)
  local comes = waiter and waiter.parked and Queue.is_awaited(lock, execution, waiter)
  -- Not if it is parked for its lock.
  if not comes or Parked.find(call, execution) then
    return nil
  end
  Queue.leave(call, lock, execution, waiter)
  return waiter
end

-- A line that waits for nothing stays as it is: the broker can simply be behind.
local function is_waited_for(execution)
  local waiter = Queue.waiter(lock, execution)
  return waiter and (waiter.turn or redis.call('EXISTS', lock.messages) == 1)
end

for _, released in ipairs(reply) do
  Holds.drop(lock, released[1])
  leave_line(released[1])
end
local head = redis.call('ZRANGE', lock.queue, 0, 0)[1]
local is_meant = head and (only == head or only == '' and is_waited_for(head))
if is_meant and #reply == 0 and Holds.permits(lock) == 0 then
  local waiter = leave_line(head)
  reply[1] = waiter and { head, waiter.line.ticket, Base.KEPT, '- ' .. waiter.label }
end
Turns.promote(call, lock)
return reply
