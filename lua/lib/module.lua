-- lib/module: a shared part whose functions a call defines when it first uses one of them.

local function module(define)
  -- To define the functions of all parts takes longer than most calls take to do what they are for.
  local lookup = {}
  function lookup.__index(_, name)
    lookup.__index = define()
    return lookup.__index[name]
  end
  return setmetatable({}, lookup)
end
