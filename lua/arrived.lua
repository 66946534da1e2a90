-- arrived: Note that a worker has received parked messages and has no slot for them yet.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- ARGV[1] life: ms, how long nobody else sends them without another note
-- ARGV[2] runs: ids with spaces between, what it has received
-- Reply {count}: how many of them are parked in this bucket
-- Keeps: a message that has arrived is not sent once more as long as its worker lives
-- Uses: lib/publish, lib/base, lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked

local meta = KEYS[1]
local life, runs = tonumber(ARGV[1]), ARGV[2]
local call = Call.begin(meta)

local count = 0
for run in string.gmatch(runs, '%S+') do
  local lock, waiter = Parked.find(call, run)
  if lock and Parked.on_its_way(call, waiter) then
    Parked.put_off(call, lock, run, waiter, call.now + life)
    count = count + 1
  end
end
return { count }
