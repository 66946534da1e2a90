-- arrived: Note that a worker has received parked messages and has no slot for them yet.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- ARGV[1] life: ms, how long the messages are not published again without another note
-- ARGV[2] executions: ids with spaces between, the executions of the messages
-- Reply {failed}: what failed for one of those that are parked in this bucket; empty if nothing
-- Keeps: a message that has arrived is not published again while its worker lives
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked

local meta = KEYS[1]
local life, executions = tonumber(ARGV[1]), ARGV[2]
local call = Base.begin(meta)
Base.write_without_memory(call.prefix)

local function note(execution)
  local lock, waiter = Parked.find(call, execution)
  if lock and Parked.on_its_way(call, waiter) then
    waiter.back = math.max(waiter.back, call.now + life)
    Queue.write_all(call, lock, execution, waiter)
  end
end

for execution in string.gmatch(executions, '%S+') do
  Base.safely(call, execution, note, execution)
end
return { call.failed or '' }
