-- Looks at what one hash of the limiter counts, without taking, settling or writing anything; the sixth part of the
-- limiter's library.
--
-- KEYS  the state as in quota.lua; then the logs of the provider's cells, or the hash of one subject
-- ARGV  names of the cells whose logs the keys are, in their order, joined by "|"; nothing for a subject
-- REPLY  for each cell, but for one with a list of chunks and no key here: name, uses that count now (those in flight among them), permits that a shadow limit would have
--   refused, permits that it would have made wait; nothing at all if there is no such hash
-- EXAMPLE  100/1s, 3 answered just now and 2 in flight
--   per-second → per-second 5 0 0

-- Uses in a string of entries from a position on whose window is over; also whether all of them are.
local function over(text, from, window, now)
  local uses = 0
  for i = from, #text, 8 do
    local ms, count = decode('<I5I3', text, i)
    if (ms + BASE_MS) * 1000 + window > now then return uses, false end
    uses = uses + count
  end
  return uses, true
end

-- Entries are in order, so all before the last chunk that begins with one that is over are over too.
local function counted(cell, now)
  local uses, all = over(cell.head, 1, cell.window, now)
  if uses > 0 then uses = uses - cell.spent end
  local older = cell.logged - cell.pushed
  if all and cell.chunks > 0 then
    local low, high = -1, cell.chunks - 1
    while low < high do
      local middle = ceil((low + high) / 2)
      local chunk = redis.call('LINDEX', cell.key, integer(middle))
      local ms = chunk and decode('<I5', chunk, 7) or 0
      if (ms + BASE_MS) * 1000 + cell.window <= now then low = middle else high = middle - 1 end
    end
    if low >= 0 then
      local chunk = redis.call('LINDEX', cell.key, integer(low))
      local more
      more, all = over(chunk, 7, cell.window, now)
      uses = older + decode('<I6', chunk) + more
      all = all and low == cell.chunks - 1
    else
      all = false
    end
  end
  if all then
    local more
    more, all = over(cell.tail, 1, cell.window, now)
    uses = uses + more
  end
  if all and cell.open_ms * 1000 + cell.window <= now then uses = uses + cell.open_uses end
  return cell.logged - uses
end

local function peek(keys, args)
  if not decode then bind() end
  local clock = clock_us()
  local of_subject = args[1] == ''
  local kept = redis.call('HMGET', keys[1], 'm', 's')
  local m, s = kept[1], kept[2]
  if not m or not s then return {} end
  -- A clock that went back counts as standing still.
  local _, _, born, _, last = decode(HEAD, m)
  local now = max(clock, last)
  if of_subject then
    kept = redis.call('HMGET', keys[2], 'm', 's')
    m, s = kept[1], kept[2]
    if not m or not s then return {} end
    -- What is of an older state, or older than all its uses, says nothing.
    local _, _, of_born, kept_until = decode(SUBJECT_HEAD, m)
    if of_born ~= born or kept_until <= now then return {} end
  end
  damaged = false
  local names, cells, names_at = decode('<I2I2', s)
  local tally = tally_of(sub(s, names_at, names_at + names - 1), s, names_at + names, cells)
  local at = (of_subject and SUBJECT_HEAD_BYTES or HEAD_BYTES) + 1
  tally.refreshed, tally[1], tally[2], tally.oldest, at = decode(TALLY, m, at)
  load_cells(tally, m, at)
  local logs, i = {}, 1
  for name in string.gmatch(args[1], '[^|]+') do
    i = i + 1
    logs[name] = keys[i]
  end
  local reply = {}
  i = 0
  for name in string.gmatch(tally.names, '[^|]+') do
    i = i + 1
    local cell, uses = tally.cells[i], 0
    cell.key = logs[name]
    -- Of a limit that the caller does not know the middle of the log is out of reach, and nobody asks for it.
    local known = cell.key or cell.chunks == 0
    if known then
      if cell.kind == LOG then
        uses = counted(cell, now) + flying(tally, cell)
      elseif cell.kind == WINDOW then
        roll(cell, now)
        uses = cell.count
      else
        uses = undrained(cell, now)
      end
      local n = #reply
      reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = name, uses, cell.refused, cell.waited
    end
  end
  return reply
end
