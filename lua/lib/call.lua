-- lib/call: the state of a call: the server's time, the bucket, the locks, the messages to resume.

local Call = {}

function Call.begin(meta)
  local micros = Base.micros()
  return {
    meta = meta,
    prefix = string.sub(meta, 1, -string.len('meta') - 1),
    micros = micros,
    now = math.floor(micros / 1000),
    locks = {},
    -- Where waiters for several locks have left; see lib/turns.
    to_promote = {},
    -- The execution of this call, if it has come back for other locks; see lib/claim.
    leaving = nil,
    -- The brokers that the caller can publish to, and the id of its command; see lib/parked.
    home = '',
    by = '',
    messages = {},
    given = {},
  }
end

return Call
