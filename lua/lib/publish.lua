-- lib/publish: how a message is published where the master can move: under Sentinels, or behind a name.

local function publish(channel, message)
  -- A listener can still be at the previous master, now a replica, which passes on what the master
  -- publishes. The master does not count this listener, so it grants nothing, and the listener must not
  -- hear of a grant. So an empty message first asks whether the master has a listener.
  -- pcall: a server that forbids the channel answers with an error. Then a heartbeat finds the grant.
  if string.sub(message, 1, 7) == 'granted' and redis.pcall('PUBLISH', channel, '') == 0 then
    return 0
  end
  return redis.pcall('PUBLISH', channel, message)
end
