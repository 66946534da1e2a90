-- lib/publish_sentinel: the same where the master moves.

local function publish(channel, message)
  -- A listener may still be at the one before, a replica now, which repeats what the master publishes.
  -- The master does not count it, so nobody is let in; nor must it hear then of a grant. So first
  -- somebody has to hear an empty message.
  if string.sub(message, 1, 7) == 'granted' and redis.pcall('PUBLISH', channel, '') == 0 then
    return 0
  end
  return redis.pcall('PUBLISH', channel, message)
end
