-- A log of uses; the first part of the limiter's library. Each part knows those before it; quota.lua has the contract.
-- Specification: src/domain/quota/cells.rs.
--
-- A log is head .. chunks .. tail .. open: strings of entries, oldest first, and the entry that is being filled. The
-- cell holds head, tail and open. The chunks are in a list of their own, so that a call reads or writes the list only
-- once in CHUNK_BYTES. A chunk begins with the number of uses that were logged before it, so that any use is found in a
-- few steps. Some uses of the head's first entry may be spent.
--
-- FORMAT  packed as in quota.lua
--   entry       instant in ms since BASE_MS 5, uses 3
--   chunk       uses before it 6; then entries

-- Set by the first call: while it loads a library, Redis hides Lua's own libraries.
local decode, encode, sub, find_text, format, ceil, floor, max, min, fmod

local function bind()
  decode, encode, sub, find_text, format = struct.unpack, struct.pack, string.sub, string.find, string.format
  ceil, floor, max, min, fmod = math.ceil, math.floor, math.max, math.min, math.fmod
end

local CHUNK_BYTES = 64
local BASE_MS = 1600000000000
local RESTORE_DEPTH = 16
-- The error of a log whose list is lost, wholly or in part. It ends the state.
local CHUNKS_LOST = 'chunks of a log are lost'

local function clock_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A whole number as an argument of a Redis command. Redis writes the number -0 as "-0" and 1e17 as "1e+17", and accepts
-- neither as an integer. Every number in a command goes through here; tests/docs/lua/numbers.rs holds that.
local function integer(number) return format('%.0f', number + 0) end

local function entry(ms, count) return encode('<I5I3', max(0, ms - BASE_MS), count) end

-- The entry with the k-th oldest use: its instant, its remaining count, the uses before it, its place (0 head, j chunk,
-- -1 tail, -2 open), and its string, position and whole count.
local function seek(cell, k)
  local before, text = 0, cell.head
  if text ~= '' then
    local ms, whole, at = decode('<I5I3', text)
    local count = whole - cell.spent
    if count >= k then return ms + BASE_MS, count, 0, 0, text, 1, whole end
    before = count
    for at = at, #text, 8 do
      ms, count = decode('<I5I3', text, at)
      if before + count >= k then return ms + BASE_MS, count, before, 0, text, at, count end
      before = before + count
    end
  end
  local older = cell.logged - cell.pushed
  if cell.chunks > 0 and k <= older + cell.base then
    if redis.call('LLEN', cell.key) ~= cell.chunks then error(CHUNKS_LOST, 0) end
    local low, high = 0, cell.chunks - 1
    while low < high do
      local middle = ceil((low + high) / 2)
      local chunk = redis.call('LINDEX', cell.key, integer(middle))
      if older + decode('<I6', chunk) < k then low = middle else high = middle - 1 end
    end
    text = redis.call('LINDEX', cell.key, integer(low))
    before = older + decode('<I6', text)
    for at = 7, #text, 8 do
      local ms, count = decode('<I5I3', text, at)
      if before + count >= k then return ms + BASE_MS, count, before, low + 1, text, at, count end
      before = before + count
    end
  end
  before, text = older + cell.base, cell.tail
  for at = 1, #text, 8 do
    local ms, count = decode('<I5I3', text, at)
    if before + count >= k then return ms + BASE_MS, count, before, -1, text, at, count end
    before = before + count
  end
  return cell.open_ms, cell.open_uses, before, -2, '', 1, cell.open_uses
end

local function forget_oldest(cell, uses)
  local _, count, before, place, text, at, whole = seek(cell, uses)
  cell.logged = cell.logged - uses
  local left = before + count - uses
  if place == 0 and at == 1 and left > 0 then
    cell.spent = whole - left
    return
  end
  if place < -1 then
    cell.open_uses = left
    cell.head, cell.spent = '', 0
  else
    cell.head, cell.spent = sub(text, left > 0 and at or at + 8), left > 0 and whole - left or 0
  end
  if place > 0 then
    redis.call('LTRIM', cell.key, integer(place), integer(-1))
    cell.chunks = cell.chunks - place
  elseif place < 0 then
    if cell.chunks > 0 then redis.call('DEL', cell.key) end
    cell.chunks, cell.tail, cell.base = 0, '', cell.pushed - cell.open_uses
  end
end

local function push(cell, ms, uses)
  if cell.granule > 1 then ms = ceil(ms / cell.granule) * cell.granule end
  if ms < cell.tail_ms then ms = cell.tail_ms end
  cell.tail_ms = ms
  cell.logged, cell.pushed = cell.logged + uses, cell.pushed + uses
  if cell.open_ms == ms or cell.open_uses == 0 then
    cell.open_ms, cell.open_uses = ms, cell.open_uses + uses
  else
    cell.tail = cell.tail .. entry(cell.open_ms, cell.open_uses)
    cell.open_ms, cell.open_uses = ms, uses
  end
end

local function restore(cell, now, ms, uses)
  if cell.spent > 0 then
    local first, whole = decode('<I5I3', cell.head)
    cell.head, cell.spent = entry(first + BASE_MS, whole - cell.spent) .. sub(cell.head, 9), 0
  end
  while #cell.head <= RESTORE_DEPTH * 8 and cell.chunks > 0 do
    local chunk = redis.call('LPOP', cell.key)
    if not chunk then error(CHUNKS_LOST, 0) end
    cell.head, cell.chunks = cell.head .. sub(chunk, 7), cell.chunks - 1
  end
  if #cell.head <= RESTORE_DEPTH * 8 then
    cell.head, cell.tail = cell.head .. cell.tail, ''
    if cell.open_uses > 0 then cell.head, cell.open_uses = cell.head .. entry(cell.open_ms, cell.open_uses), 0 end
    cell.base = cell.pushed
  end
  local at, ends = 1, min(#cell.head, RESTORE_DEPTH * 8 + 8)
  local there, count
  while at <= ends do
    there, count = decode('<I5I3', cell.head, at)
    if there + BASE_MS >= ms then break end
    at = at + 8
  end
  if at > RESTORE_DEPTH * 8 + 8 then return push(cell, ceil(now / 1000), uses) end
  cell.logged, cell.tail_ms = cell.logged + uses, max(cell.tail_ms, ms)
  local rest = at
  if at <= ends and there + BASE_MS == ms then uses, rest = uses + count, at + 8 end
  cell.head = sub(cell.head, 1, at - 1) .. entry(ms, uses) .. sub(cell.head, rest)
end

