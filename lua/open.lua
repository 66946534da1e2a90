-- open: Agree on the layout of the keys, or refuse.
-- KEYS[1] meta: hash, a bucket's fencing token and layout
-- ARGV[1] schema: number, of this client's layout
-- ARGV[2] buckets: count, the buckets of this client's layout
-- ARGV[3] kind: text, server or cluster: what this client takes it for
-- Reply {OK}: the layout is this client's
-- Reply {CLUSTER}: this is one node of a cluster, and the client takes it for the only server
-- Reply {OTHER, schema, buckets}: the namespace has another layout
-- Keeps: two clients that would look for one lock in two places never both start

local meta = KEYS[1]
local schema, buckets, kind = ARGV[1], ARGV[2], ARGV[3]

-- One node has the slot of all that such a client asks for, and would refuse it on the day when another
-- node has that. In a cluster no command of a script may have keys of two slots. (A proxy before shards
-- refuses that in other words, and is as good as one server.)
local both = kind == 'server' and redis.pcall('EXISTS', meta, (string.gsub(meta, '{0}', '{1}')))
if type(both) == 'table' and string.find(both.err, 'cript attempted to access', 1, true) then
  return { 'CLUSTER' }
end

local found = redis.call('HMGET', meta, 'schema', 'buckets')
if not found[1] then
  redis.call('HSET', meta, 'schema', schema, 'buckets', buckets)
elseif found[1] ~= schema or found[2] ~= buckets then
  return { 'OTHER', found[1], found[2] }
end
return { 'OK' }
