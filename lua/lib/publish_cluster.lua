-- lib/publish_cluster: the same in a cluster, where a message stays within the nodes of its slot.

local function send(channel, message)
  local heard = redis.pcall('SPUBLISH', channel, message)
  if type(heard) == 'table' and heard.err then
    -- A server before 7.0, or a user without the permission, publishes as everywhere.
    heard = redis.pcall('PUBLISH', channel, message)
  end
  return heard
end

local function publish(channel, message)
  -- Either way it is heard at more nodes than at this one, whose listeners are counted: see lib/publish_sentinel.
  if string.sub(message, 1, 7) == 'granted' and send(channel, '') == 0 then
    return 0
  end
  return send(channel, message)
end

-- The last key was there to be absent: while its slot moves, a script is refused before it begins.
KEYS[#KEYS] = nil
