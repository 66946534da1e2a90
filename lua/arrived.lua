-- arrived: Note that a worker has received parked messages and has no slot for them yet.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- ARGV[1] life: ms, how long the messages are not published again without another note
-- ARGV[2] executions: ids with spaces between, the executions of the messages
-- Reply {OK}: noted, of those that are parked in this bucket
-- Keeps: a message that has arrived is not published again while its worker lives
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked

local meta = KEYS[1]
local life, executions = tonumber(ARGV[1]), ARGV[2]
local call = Base.begin(meta)
Base.write_without_memory(call.prefix)

for execution in string.gmatch(executions, '%S+') do
  -- pcall: a foreign key must not keep the others from being noted.
  local _, lock, waiter = pcall(Parked.find, call, execution)
  if type(lock) == 'table' and Parked.on_its_way(call, waiter) then
    waiter.back = math.max(waiter.back, call.now + life)
    Queue.write_all(call, lock, execution, waiter)
  end
end
return { ok = 'OK' }
