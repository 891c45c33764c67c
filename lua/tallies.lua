-- Tallies: the cells that are counted together, with the leases of permits in flight; the third part of the limiter's
-- library.
-- Specification: src/domain/quota/counters.rs.
--
-- HASH  packed as in quota.lua; its fields are m, s, of the state k, and one named by the 8 bytes of each caller's incarnation
--   m           of the state: state, tally, cells; of a subject: owner, tally, cells
--   state       run id digest 8, terms digest 8, born 7, warm 7, last call 7, version 6, paused until 7, resumed at 6,
--               calls 6
--   owner       limits digest 8, last call 7, born of the state 7, kept until 7
--   tally       time to live renewed 7, charges in flight 6, lookups in flight 6, first deadline 7
--   cell        held until 7, a 7, b 7, c 7, uses ever logged 6, of them before the tail 6, chunks 4, spent 4, open ms 7,
--               open uses 4, bytes of head 4, bytes of tail 4; head, tail, and if it is a shadow limit's the next, and if
--               held until is not 0 the one behind it
--   shadow      refused 6, waited 6
--   unknown     since 7, in flight without a lease 6, those until 7; since is 0 if all earlier grants are known
--   a, b, c     of a log: uses, last ms, excess until. Of a window: its number, uses, uses of the next. Of a bucket: the
--               instant at which it is empty, and 1/1024 µs beyond it
--   s           bytes of names 2, cells 2; names and cells as the argument had them: what m was written under
--   k           of the state: scope of accounts, scope of references, rows; then digests of the members. "Not since" an
--               instant: uses granted before it are not counted, and begin to count until the other at the latest
--   scope       longest window 7, known without a hash up to windows of 7, of longer ones not since 7, until 7, none since 7,
--               until 7; only 0 if no limit counts it
--   rows        send budget 6, hands until 7, rows that joined not since 7, until 7
--   caller      number of the last call 6, its instant 7, bytes of reply 4; then the reply, then leases
--   lease       call 6, deadline 7, charges 4, lookups 4

local RECORD, LEASE = 27, 21
local CELL = '<I7I7I7I7I6I6I4I4I7I4I4I4'
local UNKNOWN = '<I7I6I7'
local TALLY, TALLY_BYTES = '<I7I6I6I7', 26
local REFRESH_US, STATE_SPARE_US = 3600000000, 86400000000

-- A tally with the cells that `text` describes from a position on, without their state.
local function tally_of(names, text, at, count)
  local tally = { 0, 0, names = names, records = sub(text, at, at + count * RECORD - 1), cells = {}, granted = { 0, 0 },
                  oldest = 0, refreshed = 0, latest = 0, leases = '', windows = false, shadow = false, held = false }
  for i = 1, count do
    local cell = { held = 0, since = 0, unleased = 0, unleased_until = 0, refused = 0, waited = 0, head = '', tail = '', pushed = 0, base = 0, chunks = 0, unused = 0,
                   logged = 0, tail_ms = 0, excess = 0, origin = 0, spent = 0, open_ms = 0, open_uses = 0, most = 0 }
    cell.kind, cell.applies, cell.mode, cell.window, cell.param, cell.granule, cell.max, cell.index, at =
      decode('<I1I1I1I7I7I4I4I2', text, at)
    tally.windows = tally.windows or cell.kind == WINDOW
    tally.shadow = tally.shadow or cell.mode == SHADOW
    tally.held = tally.held or is_held(cell)
    tally.cells[i] = cell
  end
  return tally
end

-- Loads the state of the cells from `text`, from a position on.
local function load_cells(tally, text, at)
  local cells, a, b, c, heads, tails = tally.cells, 0, 0, 0, 0, 0
  for i = 1, #cells do
    local cell = cells[i]
    cell.held, a, b, c, cell.pushed, cell.base, cell.chunks, cell.spent, cell.open_ms, cell.open_uses, heads, tails, at =
      decode(CELL, text, at)
    cell.head = heads > 0 and sub(text, at, at + heads - 1) or ''
    cell.tail = tails > 0 and sub(text, at + heads, at + heads + tails - 1) or ''
    at = at + heads + tails
    if cell.mode == SHADOW then cell.refused, cell.waited, at = decode('<I6I6', text, at) end
    if cell.held > 0 then cell.since, cell.unleased, cell.unleased_until, at = decode(UNKNOWN, text, at) end
    if cell.kind == LOG then
      cell.logged, cell.tail_ms, cell.excess = a, b, c
    elseif cell.kind == WINDOW then
      cell.this, cell.count, cell.following = a, b, c
    else
      cell.empty, cell.part = a, b
    end
  end
end

-- Takes over, limit by limit, the uses that cells of another spec counted. A new limit does not know its past.
local function adopt_all(tally, old, now, since, last)
  local known, i = {}, 0
  for name in string.gmatch(old.names, '[^|]+') do
    i = i + 1
    known[name] = old.cells[i]
  end
  i = 0
  for name in string.gmatch(tally.names, '[^|]+') do
    i = i + 1
    adopt(tally.cells[i], known[name], now, since, last)
  end
  tally.refreshed = 0
end

-- Releases leased permits once: used ones with the age of the response, unused ones with their origins.
local function release(tally, now, call, cost, kind, age, text, origins)
  if tally.leases == '' then return end
  local name, at = encode('<I6', call), 0
  repeat
    at = find_text(tally.leases, name, at + 1, true)
    if not at then return end
  until (at - 1) % LEASE == 0
  local _, deadline, charges, lookups = decode('<I6I7I4I4', tally.leases, at)
  if kind == 1 then
    cost = min(cost, charges)
    charges = charges - cost
  else
    cost = min(cost, lookups)
    lookups = lookups - cost
  end
  local left = ''
  if charges + lookups > 0 then left = encode('<I6I7I4I4', call, deadline, charges, lookups) end
  tally.leases = sub(tally.leases, 1, at - 1) .. left .. sub(tally.leases, at + LEASE)
  tally[kind] = max(0, tally[kind] - cost)
  if cost == 0 then return end
  local cells = tally.cells
  for i = 1, #cells do
    local cell = cells[i]
    if cell.mode == HELD and (cell.applies == 0 or cell.applies == kind) then
      if age then
        push(cell, ceil(max(0, now - age) / 1000), cost)
      elseif origins then
        local origin = decode('<I6', text, origins + (i - 1) * 6)
        if origin * 1000 + cell.window > now then restore(cell, now, origin, cost) end
      end
    end
  end
end

-- The leases in a caller's field, behind the number, instant and reply of its last call.
local function leases_in(own)
  local _, _, bytes = decode('<I6I7I4', own)
  return sub(own, 18 + bytes)
end

-- Ends leases past their deadline. The provider has counted their requests by then. So they count as answered at the
-- deadline, and each limit's window runs from there.
local function expire(tally, now, mine)
  for i = 1, #tally.cells do
    local cell = tally.cells[i]
    if cell.unleased > 0 and cell.unleased_until <= now then
      if cell.kind == LOG and cell.unleased_until + cell.window > now then
        push(cell, ceil(cell.unleased_until / 1000), cell.unleased)
      end
      cell.unleased = 0
    end
  end
  if tally[1] + tally[2] == 0 then tally.oldest = 0 end
  if tally[1] + tally[2] == 0 or now < tally.oldest then return end
  local oldest, over = 0, {}
  local function live_of(leases)
    local live = {}
    for at = 1, #leases, LEASE do
      local _, deadline, charges, lookups = decode('<I6I7I4I4', leases, at)
      if deadline <= now then
        tally[1], tally[2] = max(0, tally[1] - charges), max(0, tally[2] - lookups)
        over[#over + 1] = { deadline, charges, lookups }
      else
        live[#live + 1] = sub(leases, at, at + LEASE - 1)
        if oldest == 0 or deadline < oldest then oldest = deadline end
      end
    end
    return table.concat(live)
  end
  local fields = redis.call('HGETALL', tally.key)
  for i = 1, #fields, 2 do
    local field, own = fields[i], fields[i + 1]
    if #field == 8 and field ~= mine then
      local leases = leases_in(own)
      local live = live_of(leases)
      if live ~= leases then redis.call('HSET', tally.key, field, sub(own, 1, #own - #leases) .. live) end
    end
  end
  tally.leases = live_of(tally.leases)
  tally.oldest = oldest
  -- In the order of the log. Leases whose window is over are not logged behind younger uses.
  table.sort(over, function(one, other) return one[1] < other[1] end)
  for _, lease in ipairs(over) do
    for _, cell in ipairs(tally.cells) do
      local uses = in_flight({ lease[2], lease[3] }, cell.applies)
      if cell.mode == HELD and uses > 0 and lease[1] + cell.window > now then push(cell, ceil(lease[1] / 1000), uses) end
    end
  end
end

-- Prepares the cells before the first want of a call.
local function open_cells(tally, now, jitter, horizon)
  local cells = tally.cells
  for i = 1, #cells do
    local cell = cells[i]
    if cell.kind == LOG then
      cell.unused = cell.max - cell.logged - flying(tally, cell)
      cell.exceeds, cell.starts = false, nil
      open_crowd(cell, jitter, now + horizon)
    elseif cell.kind == WINDOW then
      roll(cell, now)
    elseif cell.kind == SLOTS then
      cell.unused = cell.max - flying(tally, cell)
    end
  end
  tally.granted[1], tally.granted[2], tally.latest = 0, 0, now
end

-- Ends a call's grants: logs the starts, and holds the granted permits until their response or the deadline.
local function close(tally, number, lasts, jitter)
  local charges, lookups = tally.granted[1], tally.granted[2]
  local cells = tally.cells
  for i = 1, #cells do
    local cell = cells[i]
    if cell.exceeds then cell.excess = max(cell.excess, tally.latest) end
    if cell.starts then
      for at = 1, #cell.starts, 2 do push(cell, ceil((cell.starts[at] + jitter) / 1000), cell.starts[at + 1]) end
    end
  end
  if not tally.held or charges + lookups == 0 then return end
  local deadline = tally.latest + lasts
  tally.leases = tally.leases .. encode('<I6I7I4I4', number, deadline, charges, lookups)
  tally[1], tally[2] = tally[1] + charges, tally[2] + lookups
  if tally.oldest == 0 or deadline < tally.oldest then tally.oldest = deadline end
end

-- Turns a long tail into a chunk, which enters its list after the cell says so.
local function spill(cell, chunks)
  if cell.head == '' and cell.chunks == 0 then
    cell.head, cell.spent = cell.tail, 0
  else
    chunks = chunks or {}
    chunks[#chunks + 1], chunks[#chunks + 2] = cell.key, encode('<I6', cell.base) .. cell.tail
    cell.chunks = cell.chunks + 1
  end
  cell.tail, cell.base = '', cell.pushed - cell.open_uses
  return chunks
end

local function state_of(cell)
  local a, b, c
  if cell.kind == LOG then
    a, b, c = cell.logged, cell.tail_ms, cell.excess
  elseif cell.kind == WINDOW then
    a, b, c = cell.this, cell.count, cell.following
  else
    a, b, c = cell.empty, cell.part, 0
  end
  -- Not 0, because a field follows it.
  if cell.unleased > 0 and cell.held == 0 then cell.held = 1 end
  local numbers = encode(CELL, cell.held, a, b, c, cell.pushed, cell.base, cell.chunks, cell.spent, cell.open_ms,
    cell.open_uses, #cell.head, #cell.tail)
  if cell.mode == SHADOW or cell.held > 0 then
    local shadow = cell.mode == SHADOW and encode('<I6I6', cell.refused, cell.waited) or ''
    local unknown = cell.held > 0 and encode(UNKNOWN, cell.since, cell.unleased, cell.unleased_until) or ''
    return numbers .. cell.head .. cell.tail .. shadow .. unknown
  end
  return numbers, cell.head, cell.tail
end

-- Writes a tally behind the hash's head, with the caller's field if that is not empty. The tally counts for `kept` µs.
-- Its key lives `spare` µs longer (by default a quarter of `kept`, at most an hour), and is renewed before `spare` is
-- over.
local function save(tally, head, now, mine, own, kept, spare)
  spare = spare or min(REFRESH_US, ceil(kept / 4))
  local cells, chunks = tally.cells, nil
  for i = 1, #cells do
    if cells[i].key and #cells[i].tail >= CHUNK_BYTES then chunks = spill(cells[i], chunks) end
  end
  local fresh = now >= tally.refreshed + min(REFRESH_US, spare)
  if fresh then tally.refreshed = now end
  -- Joined in one expression, because Lua reads all bytes of each string that it makes.
  local numbers, first, last = state_of(cells[1])
  local state = head .. encode(TALLY, tally.refreshed, tally[1], tally[2], tally.oldest) .. numbers .. (first or '') .. (last or '')
  for i = 2, #cells do
    numbers, first, last = state_of(cells[i])
    state = state .. numbers .. (first or '') .. (last or '')
  end
  if not own then
    redis.call('HSET', tally.key, 'm', state, 's', encode('<I2I2', #tally.names, #cells) .. tally.names .. tally.records)
    if tally.had_own then redis.call('HDEL', tally.key, mine) end
  elseif tally.adopted or tally.known_text then
    local limits = encode('<I2I2', #tally.names, #cells) .. tally.names .. tally.records
    -- The record of the past is written together with the limits that it belongs to, or neither is.
    if tally.known_text then
      redis.call('HSET', tally.key, 'm', state, mine, own, 's', limits, 'k', tally.known_text)
    else
      redis.call('HSET', tally.key, 'm', state, mine, own, 's', limits)
    end
  else
    redis.call('HSET', tally.key, 'm', state, mine, own)
  end
  for i = 1, chunks and #chunks or 0, 2 do redis.call('RPUSH', chunks[i], chunks[i + 1]) end
  if fresh or chunks then
    local ttl = integer(ceil((kept + spare) / 1000))
    redis.call('PEXPIRE', tally.key, ttl)
    for i = 1, #cells do
      if cells[i].chunks > 0 then redis.call('PEXPIRE', cells[i].key, ttl) end
    end
  end
end
