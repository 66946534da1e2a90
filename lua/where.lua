-- where: Return where the message of a task is parked, or awaited in a line, and change nothing.
-- KEYS[1] parked: hash, the lock of each parked execution
-- KEYS[2] sent: string, the execution of the task that has a place in a line
-- ARGV[1] task: id, the task
-- Reply {ms, execution, name, position, ticket, place, message}: server's time; its place; the message, empty if awaited
-- Reply {ms}: it has no place, or runs
-- Keeps: reads only
-- Uses: lib/module, lib/base

local parked, sent, task = KEYS[1], KEYS[2], ARGV[1]
local now = math.floor(Base.micros() / 1000)
local prefix = string.sub(parked, 1, -string.len('parked') - 1)

local execution = redis.call('HGET', parked, '#' .. task)
local name = execution and redis.call('HGET', parked, execution)
if not name then
  execution = redis.call('GET', sent)
  name = execution and redis.call('GET', prefix .. 'sent:' .. execution)
end
local place = name and redis.call('HGET', prefix .. 'w:' .. name, execution)
local waiter = Base.decoded(place)
if not waiter then
  return { now }
end
-- The message is a copy of one that runs: it waits behind its own execution.
local hold = Base.parse(redis.call('HGET', prefix .. 'l:' .. name, execution))
if hold and hold.attempt ~= Base.KEPT and hold.expiry > now then
  return { now }
end
local queue = prefix .. 'q:' .. name
local rank = redis.call('ZRANK', queue, execution)
local message = redis.call('HGET', prefix .. 'm:' .. name, execution) or waiter.line and ''
if not rank or not message then
  return { now }
end
local ticket = redis.call('ZRANGE', queue, rank, rank, 'WITHSCORES')[2]
local running = Base.running(prefix .. 'l:' .. name, queue, prefix .. 'w:' .. name)
return { now, execution, name, math.max(rank + 1 - running, 1), ticket, place, message }
