-- resume: Hand out the parked messages that are to be sent on now.
-- KEYS[1] meta: hash, the bucket's fence and layout
-- KEYS[2] due: sorted set, when to look at which lock, and at which run
-- ARGV[1] home: text, the broker that the caller can send to
-- ARGV[2] by: id, of this call
-- ARGV[3] most: count, locks and runs to look at
-- ARGV[4] tasks: ids with spaces between, tasks whose message is wanted at once, lock or not
-- Reply {ms, run, name, message, …}: when the next look is due, -1 for never; messages to send
-- Keeps: what is parked is sent on, whoever was to do it and has died
-- Uses: lib/publish, lib/base, lib/call, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/turns

local meta, due = KEYS[1], KEYS[2]
local home, by, most, tasks = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local call = Call.begin(meta)
call.home, call.by = home, by

-- A clock that was set back puts off what is due: all of it is brought forward by as much.
local function mind_the_clock()
  if redis.call('EXISTS', due) == 0 then
    redis.call('HDEL', meta, 'clock')
    return
  end
  local back = tonumber(redis.call('HGET', meta, 'clock') or 0) - call.now
  if back > 1000 then
    local all = redis.call('ZRANGE', due, 0, -1, 'WITHSCORES')
    for i = 1, #all, 2 do
      redis.call('ZADD', due, string.format('%.0f', all[i + 1] - back), all[i])
    end
  end
  if math.abs(back) > 1000 then
    redis.call('HSET', meta, 'clock', string.format('%.0f', call.now))
  end
end

-- What stops a lock from being looked at any more is that nothing is parked there.
local function look_at_lock(name)
  local lock = Holds.open(call, call.prefix .. 'l:' .. name)
  redis.call('ZREM', due, 'l ' .. name)
  if redis.call('EXISTS', lock.queue) == 1 then
    Turns.promote(call, lock)
  end
end

local function send_on(run)
  local lock, waiter = Parked.find(call, run)
  local wanted = lock and (not Parked.on_its_way(call, waiter) or Parked.is_owed(call, run, waiter))
  if lock and (not wanted or Parked.hand_out(call, lock, run, waiter)) then
    redis.call('ZADD', due, string.format('%.0f', waiter.back), 'r ' .. run)
  else
    redis.call('ZREM', due, 'r ' .. run)
  end
end

-- Whoever found its turn could not send it. Who is no longer on the way is found in the line.
local owed = call.prefix .. 'owed:' .. home
for _, run in ipairs(redis.call('ZRANGE', owed, 0, most - 1)) do
  redis.call('ZREM', owed, run)
  local lock, waiter = Parked.find(call, run)
  if lock and Parked.on_its_way(call, waiter) then
    Parked.hand_out(call, lock, run, waiter)
  end
end
for task in string.gmatch(tasks, '%S+') do
  local run = redis.call('HGET', call.prefix .. 'parked', '#' .. task)
  if run then
    send_on(run)
  end
end
mind_the_clock()
local now = string.format('%.0f', call.now)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)) do
  local kind, what = string.sub(member, 1, 1), string.sub(member, 3)
  if kind == 'l' then
    look_at_lock(what)
  else
    send_on(what)
  end
end

local pause, next_due = -1, redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
if redis.call('EXISTS', owed) == 1 then
  pause = 0
elseif next_due[2] then
  pause = math.max(tonumber(next_due[2]) - call.now, 0)
end
return { pause, unpack(call.messages) }
