-- Looks at what one hash of the limiter counts, without taking, settling or writing anything; follows log.lua and
-- cells.lua in one script.
--
-- KEYS  1 a tally as in quota.lua (the state, or a subject's), then the logs of its cells, if it has any
-- ARGV  1 names of the cells whose logs the keys are, in their order, joined by "|"
-- REPLY for each cell of the tally: name, uses that count now (those in flight among them), permits that a shadow limit
--       would have refused, permits that it would have made wait
-- EXAMPLE  100/1s with 3 answered and 2 in flight: ARGV per-second → per-second 5 0 0

local keys, at = {}, 1
for name in string.gmatch(ARGV[1], '[^|]+') do
  at = at + 1
  keys[name] = KEYS[at]
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local stored = redis.call('HMGET', KEYS[1], 'm', 'n')
if not stored[1] then return {} end

-- Uses in a string of entries from a position on whose window is over; also whether all of them are.
local function over(text, from, window)
  local uses = 0
  for i = from, #text, 8 do
    local ms, count = decode('<I5I3', text, i)
    if (ms + BASE_MS) * 1000 + window > now then return uses, false end
    uses = uses + count
  end
  return uses, true
end

-- Entries are in order, so all before the last chunk that begins with one that is over are over too.
local function counted(cell)
  local uses, all = over(cell.head, 1, cell.window)
  local older = cell.logged - cell.pushed
  if all and cell.chunks > 0 then
    local low, high = -1, cell.chunks - 1
    while low < high do
      local middle = ceil((low + high) / 2)
      local chunk = redis.call('LINDEX', cell.key, middle)
      local ms = chunk and decode('<I5', chunk, 7) or 0
      if (ms + BASE_MS) * 1000 + cell.window <= now then low = middle else high = middle - 1 end
    end
    if low >= 0 then
      local chunk = redis.call('LINDEX', cell.key, low)
      local more
      more, all = over(chunk, 7, cell.window)
      uses = older + decode('<I6', chunk) + more
      all = all and low == cell.chunks - 1
    else
      all = false
    end
  end
  if all then uses = uses + over(cell.tail, 1, cell.window) end
  return cell.logged - uses
end

local _, _, _, charges, lookups, _, first = decode('<I7I7I7I6I6I7', stored[1])
local tally = { charges, lookups }
local reply = {}
for name in string.gmatch(stored[2], '[^|]+') do
  local record = sub(stored[1], first, first + SIGNATURE - 1) .. encode('<I4I2', 0, 0)
  local cell
  cell, first = cell_of(record, 1, keys[name], stored[1], first)
  local uses
  if cell.kind == LOG then
    uses = counted(cell) + (cell.mode == HELD and in_flight(tally, cell.applies) or 0)
  elseif cell.kind == WINDOW then
    roll(cell, now)
    uses = cell.count
  else
    uses = ceil(backlog(cell, now) / max(1, cell.param))
  end
  local n = #reply
  reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = name, uses, cell.refused, cell.waited
end
return reply
