-- lib/publish: how a message is published where the master can move: under Sentinels, or behind a name.

-- Whether nobody listens to a channel here. An empty message asks, and PUBLISH counts who listens to a pattern
-- as well: somebody who watches the server would be taken for each waiter that is gone.
-- pcall: a server that forbids the channel answers with an error. Then a heartbeat finds the grant.
local function is_unheard(channel)
  local heard = redis.pcall('PUBLISH', channel, '')
  if type(heard) ~= 'number' or heard == 0 then
    return heard == 0
  end
  return redis.pcall('PUBSUB', 'NUMSUB', channel)[2] == 0
end

local function publish(channel, message)
  -- A listener can still be at the previous master, now a replica, which passes on what the master
  -- publishes. The master does not count this listener, so it grants nothing, and the listener must not
  -- hear of a grant.
  if string.sub(message, 1, 7) == 'granted' and is_unheard(channel) then
    return 0
  end
  return redis.pcall('PUBLISH', channel, message)
end
