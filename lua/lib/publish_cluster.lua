-- lib/publish_cluster: how a message is published in a cluster, and a key that is there to be absent.

local function send(channel, message)
  local heard = redis.pcall('SPUBLISH', channel, message)
  if type(heard) == 'table' and heard.err then
    -- Before Redis 7.0, and without the permission, publish to all nodes.
    heard = redis.pcall('PUBLISH', channel, message)
    if message == '' and heard ~= 0 then
      heard = redis.pcall('PUBSUB', 'NUMSUB', channel)[2]  -- see lib/publish
    end
  end
  return heard
end

local function publish(channel, message)
  -- Either way more nodes pass the message on than this one, which counts its own listeners: see
  -- lib/publish.
  if string.sub(message, 1, 7) == 'granted' and send(channel, '') == 0 then
    return 0
  end
  return send(channel, message)
end

-- The last key never exists: while its slot moves, it makes the server refuse the script at once.
KEYS[#KEYS] = nil
