-- lib/call: what every decision needs to know: the server's time, the bucket, the next fence.

local Call = {}

function Call.begin(meta)
  local time = redis.call('TIME')
  local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
  return {
    meta = meta,
    prefix = string.sub(meta, 1, -string.len('meta') - 1),
    micros = micros,
    now = math.floor(micros / 1000),
    locks = {},
    -- Which broker the caller can send to, and its name for what it was given; see lib/parked.
    home = '',
    by = '',
    messages = {},
    given = {},
    untold = {},
  }
end

-- Strictly above every fence before it, also after the counter was lost (time has moved on) and after
-- the clock was set back (the counter is kept). '%.0f': tostring() would round to 14 digits.
-- Spent before anybody is told of it: a server that may not write (no memory, a replica) stops the
-- script here, while no message is out.
function Call.next_fence(call)
  local last = tonumber(redis.call('HGET', call.meta, 'fence') or 0)
  local fence = string.format('%.0f', math.max(last + 1, call.micros))
  redis.call('HSET', call.meta, 'fence', fence)
  return fence
end
