-- open: Agree on the layout of the keys, or refuse.
-- KEYS[1] meta: hash, a bucket's fencing token and layout
-- ARGV[1] schema: number, of this client's layout
-- ARGV[2] buckets: count, the buckets of this client's layout
-- Reply {OK}: the layout is this client's
-- Reply {OTHER, schema, buckets}: the namespace has another layout
-- Keeps: two clients that would look for one lock in two places never both start

local meta = KEYS[1]
local schema, buckets = ARGV[1], ARGV[2]

local found = redis.call('HMGET', meta, 'schema', 'buckets')
if not found[1] then
  redis.call('HSET', meta, 'schema', schema, 'buckets', buckets)
elseif found[1] ~= schema or found[2] ~= buckets then
  return { 'OTHER', found[1], found[2] }
end
return { 'OK' }
