-- lib/publish: how a message is sent, on one server.

local function publish(channel, message)
  -- pcall: one that forbids the channel answers with an error; then a heartbeat finds what was told.
  return redis.pcall('PUBLISH', channel, message)
end
