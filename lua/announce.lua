-- announce: Note that a worker consumes some channels, or no longer, and tell how many do.
-- KEYS[1..] live: sorted set, the workers that consume a channel, by when they cease to count
-- ARGV[1] worker: id, empty only asks
-- ARGV[2] life: ms, how long it counts without another note; 0 takes it out
-- Reply {count, …}: how many workers consume each channel now
-- Keeps: what is published to a channel is published where somebody listens, or did a moment ago
-- Uses: lib/base

local channels = KEYS
local worker, life = ARGV[1], tonumber(ARGV[2])
local now = math.floor(Base.micros() / 1000)

local reply = {}
for i, live in ipairs(channels) do
  redis.call('ZREMRANGEBYSCORE', live, '-inf', now)
  -- Written before the clock was set back.
  redis.call('ZREMRANGEBYSCORE', live, now + Base.GRACE, '+inf')
  if life > 0 then
    redis.call('ZADD', live, now + life, worker)
    redis.call('PEXPIRE', live, Base.GRACE)
  elseif worker ~= '' then
    redis.call('ZREM', live, worker)
  end
  reply[i] = redis.call('ZCARD', live)
end
return reply
