-- force_release: Release a lock by force, notify its holders, and let the next waiters in.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] lock: hash, the holds of the lock
-- ARGV[1] execution: id, only this execution's hold; empty releases all
-- Reply {{execution, fence, owner, label}, …}: the holds that were released
-- Keeps: a holder that loses its hold is notified at once; the next waiters get in
-- Uses: lib/publish, lib/base, lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/turns

local meta, key = KEYS[1], KEYS[2]
local only = ARGV[1]
local call = Call.begin(meta)
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
for _, released in ipairs(reply) do
  Holds.drop(lock, released[1])
end
if redis.call('EXISTS', lock.queue) == 1 then
  Turns.promote(call, lock)
end
return reply
