-- lib/facts: the live holds of a lock, for people.

local Facts = {}

-- The facts about a hold; nil if it has lapsed.
function Facts.of(key, now, execution, record, label)
  local hold = Base.parse(record) or error('RELOCK-FOREIGN ' .. key)
  if hold.expiry > now then
    local left = math.min(hold.expiry - now, Base.longest(hold.bound))
    local shared = hold.shared and 1 or 0
    return { execution, left, hold.fence, hold.attempt, hold.owner, label or '', shared }
  end
end

function Facts.every(key, now)
  local fields, records, found = redis.call('HGETALL', key), {}, {}
  for i = 1, #fields, 2 do
    records[fields[i]] = fields[i + 1]
  end
  for i = 1, #fields, 2 do
    local execution = fields[i]
    if string.sub(execution, 1, 1) ~= '@' then
      found[#found + 1] = Facts.of(key, now, execution, fields[i + 1], records['@' .. execution])
    end
  end
  return found
end
