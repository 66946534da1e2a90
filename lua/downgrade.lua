-- downgrade: Let others share the locks that an execution holds alone.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2..] lock: hash, the holds of a lock; one key per lock
-- ARGV[1] execution: id, the execution of one message
-- ARGV[2] attempt: id, the attempt that acquired the locks
-- Reply {SHARED}: the locks are shared
-- Reply {JOINED, index}: nothing has changed: others hold this lock as well, and rely on it
-- Reply {LOST}: nothing has changed: the attempt does not hold all of the locks
-- Keeps: a hold that others have re-entered stays exclusive; the first waiters get in first; sent twice it acts once
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/lines, lib/turns

local meta, keys = KEYS[1], KEYS
local execution, attempt = ARGV[1], ARGV[2]
local call = Base.begin(meta)
Base.write_without_memory(call.prefix)

local locks = {}
for i = 2, #keys do
  local lock = Holds.open(call, keys[i])
  local hold = lock.holds[execution]
  if not hold or hold.attempt ~= attempt then
    return { 'LOST' }
  end
  if not hold.shared and (Holds.permits(lock) > 1 or Holds.size(lock, hold.fence) > 1) then
    return { 'JOINED', i - 1 }
  end
  locks[i - 1] = lock
end
for _, lock in ipairs(locks) do
  Holds.share(lock, execution, true)
end
for _, lock in ipairs(locks) do
  Turns.promote(call, lock)
end
return { 'SHARED' }
