-- resume: Hand out the parked messages that are due.
-- KEYS[1] meta: hash, the bucket's fencing token and layout
-- KEYS[2] due: sorted set, when to look at which lock, and at which execution
-- ARGV[1] homes: ids with spaces between, the brokers that the caller can publish to
-- ARGV[2] by: id, this call
-- ARGV[3] most: count, locks and executions to look at
-- ARGV[4] tasks: ids with spaces between, tasks whose message to hand out at once, with or without a lock
-- Reply {ms, failed, passed, execution, name, message, …}: when to look again, -1 for never; what failed; calls passed over; messages
-- Keeps: a parked message is resumed even if the process that should resume it has died; a foreign key hurts its own lock alone
-- Uses: lib/publish, lib/module, lib/base, lib/holds, lib/deadlock, lib/queue, lib/parked, lib/lines, lib/turns

local meta, due = KEYS[1], KEYS[2]
local homes, by, most, tasks = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local call = Base.begin(meta)
call.home, call.by = homes, by
Base.write_without_memory(call.prefix)

-- If the clock was set back, all due times would come late: bring them forward by as much.
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

-- Parked.schedule sets the next look while anything is parked at the lock.
local function look_at_lock(name)
  local lock = Holds.open(call, call.prefix .. 'l:' .. name)
  redis.call('ZREM', due, 'l ' .. name)
  Turns.promote(call, lock)
end

-- A message that is gone, or was given up, has left: those behind it can have their turn now.
local function follow(lock)
  if lock then
    Turns.promote(call, lock)
  end
end

local function resume(execution)
  local lock, waiter = Parked.find(call, execution)
  if lock and Parked.send(call, lock, execution, waiter) then
    redis.call('ZADD', due, string.format('%.0f', waiter.back), 'r ' .. execution)
  else
    redis.call('ZREM', due, 'r ' .. execution)
    follow(lock)
  end
end

-- A revoked call must hold up nobody while its message has not come.
local function revoke(task)
  local execution = redis.call('GET', call.prefix .. 'sent:#' .. task)
  if execution then
    Turns.withdraw(call, execution)
  end
end

-- The caller that found the turn of this execution could not publish its message. A message that is no
-- longer on its way is found by its queue.
local function settle(execution)
  local lock, waiter = Parked.find(call, execution)
  if lock and Parked.on_its_way(call, waiter) and not Parked.hand_out(call, lock, execution, waiter) then
    follow(lock)
  end
end

-- What fails is tried again later.
local function safely(step, what, member)
  if not Base.safely(call, what, step, what) and member then
    redis.call('ZADD', due, string.format('%.0f', call.now + Base.GRACE), member)
  end
end

for home in string.gmatch(homes, '%S+') do
  local owed = call.prefix .. 'owed:' .. home
  for _, execution in ipairs(redis.call('ZRANGE', owed, 0, most - 1)) do
    redis.call('ZREM', owed, execution)
    safely(settle, execution)
  end
end
for task in string.gmatch(tasks, '%S+') do
  local execution = redis.call('HGET', call.prefix .. 'parked', '#' .. task)
  if execution then
    safely(resume, execution)
  else
    safely(revoke, task)
  end
end
mind_the_clock()
local now = string.format('%.0f', call.now)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, most)) do
  local kind, what = string.sub(member, 1, 1), string.sub(member, 3)
  safely(kind == 'l' and look_at_lock or resume, what, member)
end

local pause, next_due = -1, redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
local is_owed = false
for home in string.gmatch(homes, '%S+') do
  is_owed = is_owed or redis.call('EXISTS', call.prefix .. 'owed:' .. home) == 1
end
if is_owed then
  pause = 0
elseif next_due[2] then
  pause = math.max(tonumber(next_due[2]) - call.now, 0)
end
local passed = redis.call('ZRANGE', call.prefix .. 'passed', 0, most - 1)
for _, told in ipairs(passed) do
  redis.call('ZREM', call.prefix .. 'passed', told)
end
return { pause, call.failed or '', passed, unpack(call.messages) }
