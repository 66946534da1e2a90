-- What the Lua inside Redis 6.2 offers, and no more.
std = {
  read_globals = {
    'redis', 'cjson', 'cmsgpack', 'bit', 'KEYS', 'ARGV',
    'assert', 'error', 'ipairs', 'next', 'pairs', 'pcall', 'select', 'tonumber', 'tostring', 'type',
    'unpack', math = {}, string = {}, table = {},
  },
}
for _, library in ipairs { 'math', 'string', 'table' } do
  std.read_globals[library] = { other_fields = true }
end
max_line_length = 110
max_cyclomatic_complexity = 12
-- The loader puts the fragments of lib/ into a verb, where they are locals that see each other.
files['lua/lib'].ignore = { '211/[A-Z].*', '241/[A-Z].*', '221/[A-Z].*', '331/[A-Z].*' }
files['lua/lib'].globals = { 'Call', 'Holds', 'Queue' }
files['lua/*.lua'].read_globals = { Call = { other_fields = true }, Holds = { other_fields = true }, Queue = { other_fields = true } }
