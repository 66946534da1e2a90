-- where: Return where the message of a task is parked, and change nothing.
-- KEYS[1] parked: hash, the lock of each parked execution
-- ARGV[1] task: id, the task
-- Reply {ms, execution, name, position, ticket, place, message}: server's time; the message and its place; the time alone if none is parked
-- Keeps: reads only
-- Uses: lib/base

local parked, task = KEYS[1], ARGV[1]
local now = math.floor(Base.micros() / 1000)
local prefix = string.sub(parked, 1, -string.len('parked') - 1)

local execution = redis.call('HGET', parked, '#' .. task)
local name = execution and redis.call('HGET', parked, execution)
local place = name and redis.call('HGET', prefix .. 'w:' .. name, execution)
if not Base.decoded(place) then
  return { now }
end
local queue = prefix .. 'q:' .. name
local rank = redis.call('ZRANK', queue, execution)
local message = redis.call('HGET', prefix .. 'm:' .. name, execution)
if not rank or not message then
  return { now }
end
local ticket = redis.call('ZRANGE', queue, rank, rank, 'WITHSCORES')[2]
return { now, execution, name, rank + 1, ticket, place, message }
