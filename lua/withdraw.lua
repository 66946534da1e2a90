-- withdraw: Remove a parked message, or the place of one that is awaited, from its queues for good, and let the next waiters in.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] tombstone: string, how the execution ended
-- ARGV[1] execution: id, the execution of one message
-- ARGV[2] remember: ms, life of the tombstone; 0 for none, if its message may come again
-- ARGV[3] attempt: id, of whom this is: a message that another attempt has parked since stays; empty for any
-- Reply {WITHDRAWN}: it has left its queues
-- Reply {GONE}: it was not parked; or its execution has begun, and only its message can come again
-- Reply {ENDED}: it was not parked, and has ended: an earlier copy of this command did that, perhaps
-- Keeps: a revoked or expired execution holds up nobody
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/lines, lib/turns

local meta, tombstone = KEYS[1], KEYS[2]
local execution, remember, attempt = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local call = Base.begin(meta)
Base.write_without_memory(call.prefix)

if attempt ~= '' then
  local _, parked = Parked.find(call, execution)
  -- One that was handed out since may be the message that this attempt had, which was brought back.
  if parked and parked.attempt ~= attempt and not parked.sent then
    return { 'GONE' }
  end
end
if not Turns.withdraw(call, execution) then
  if Base.is_over(redis.call('GET', tombstone)) then
    return { 'ENDED' }
  end
  return { 'GONE' }
end
if remember > 0 then
  redis.call('SET', tombstone, '*', 'PX', remember)
end
return { 'WITHDRAWN' }
