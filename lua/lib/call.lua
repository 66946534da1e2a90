-- lib/call: what every decision needs to know: the server's time, the bucket, what is to be sent.

local Call = {}

function Call.begin(meta)
  local micros = Base.micros()
  return {
    meta = meta,
    prefix = string.sub(meta, 1, -string.len('meta') - 1),
    micros = micros,
    now = math.floor(micros / 1000),
    locks = {},
    -- Which brokers the caller can send to, and its name for what it was given; see lib/parked.
    home = '',
    by = '',
    messages = {},
    given = {},
    untold = {},
  }
end
