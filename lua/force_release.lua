-- force_release: Take a lock away from its holders, tell them, and let the next ones in.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2] lock: hash, the holds of the lock
-- ARGV[1] run: id, only this run's hold; empty takes all
-- Reply {{run, fence, owner, who}, …}: the holds that were taken away
-- Keeps: whoever loses its hold is told at once; the next ones get in
-- Uses: lib/publish, lib/base, lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/turns

local meta, key = KEYS[1], KEYS[2]
local only = ARGV[1]
local call = Call.begin(meta)
local lock = Holds.open(call, key)

local reply = {}
for run, hold in pairs(lock.holds) do
  if only == '' or only == run then
    local who = redis.call('HGET', key, '@' .. run) or ''
    reply[#reply + 1] = { run, hold.fence, hold.owner, who }
    local inbox = call.prefix .. 'i:' .. string.match(who, '^(%S*)')
    publish(inbox, table.concat({ 'lost', run, hold.nonce }, ' '))
  end
end
for _, taken in ipairs(reply) do
  Holds.drop(lock, taken[1])
end
if redis.call('EXISTS', lock.queue) == 1 then
  Turns.promote(call, lock)
end
return reply
