-- withdraw: Take a parked message out of its queues for good, and let the next ones in.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2] tombstone: string, how the run ended
-- ARGV[1] run: id, the execution of one message
-- ARGV[2] remember: ms, life of the tombstone
-- ARGV[3] home: text, the broker that the caller can send parked messages to; empty sends none
-- Reply {WITHDRAWN, run, name, message, …}: its place is free; messages to send
-- Reply {GONE}: it was not parked
-- Keeps: a revoked or expired run holds up nobody
-- Uses: lib/publish, lib/base, lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/turns

local meta, tombstone = KEYS[1], KEYS[2]
local run, remember, home = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local call = Call.begin(meta)
call.home, call.by = home, run

if not Turns.withdraw(call, run) then
  return { 'GONE' }
end
redis.call('SET', tombstone, '*', 'PX', remember)
return { 'WITHDRAWN', unpack(call.messages) }
