-- lib/publish: how a message is published on one server.

local function publish(channel, message)
  -- pcall: a server that forbids the channel answers with an error. Then a heartbeat finds the grant.
  return redis.pcall('PUBLISH', channel, message)
end
