-- announce: Note that a worker consumes some channels, or no longer consumes them, and count the consumers.
-- KEYS[1..] live: sorted set, the workers that consume a channel, by when they cease to count
-- ARGV[1] worker: id, empty only asks and writes nothing
-- ARGV[2] life: ms, how long the worker counts without another note; 0 removes it
-- Reply {count, …}: how many workers consume each channel now
-- Keeps: a message is published to a channel only if somebody consumes the channel, or did a moment ago
-- Uses: lib/module, lib/base

local channels = KEYS
local worker, life = ARGV[1], tonumber(ARGV[2])
local now = math.floor(Base.micros() / 1000)

-- Later ones are from before the clock was set back.
local after, before = string.format('(%.0f', now), string.format('(%.0f', now + Base.GRACE)
local reply = {}
for i, live in ipairs(channels) do
  if worker ~= '' then
    redis.call('ZREMRANGEBYSCORE', live, '-inf', now)
    redis.call('ZREMRANGEBYSCORE', live, now + Base.GRACE, '+inf')
    redis.call('ZREM', live, worker)
  end
  if life > 0 then
    redis.call('ZADD', live, now + life, worker)
    redis.call('PEXPIRE', live, Base.GRACE)
  end
  reply[i] = redis.call('ZCOUNT', live, after, before)
end
return reply
