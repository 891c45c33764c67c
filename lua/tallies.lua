-- What is counted together: cells, and leases of permits in flight; the third part of the limiter's script.
-- Specification: src/domain/quota/tally.rs.

-- The same limit with other numbers, its uses carried over; one that counts otherwise, and one that is new, does not know
-- its past. Uses beyond a lowered limit stay: they still count, and would count again if the limit were raised.
local function adopt(cell, was, now, unknown_until)
  if was then
    local kind, applies, mode, window, param = decode('<I1I1I1I7I7', was)
    local same = kind == cell.kind and applies == cell.applies
    if kind == LOG then same = same and (mode == HELD) == (cell.mode == HELD) end
    if kind == WINDOW then same = same and window == cell.window and param == cell.param end
    if same then
      if kind == BUCKET and param ~= cell.param then
        local uses = ceil(backlog(cell, now) / max(1, param))
        cell.empty, cell.part = now, 0
        drain_later(cell, now, uses)
      elseif kind ~= BUCKET and window < cell.window then
        cell.held = unknown_until
      end
      return
    end
  end
  cell.held, cell.refused, cell.waited = unknown_until, 0, 0
  cell.head, cell.tail, cell.pushed, cell.base, cell.chunks = '', '', 0, 0, 0
  if cell.kind == LOG then
    cell.logged, cell.tail_ms, cell.excess = 0, 0, 0
    if cell.key then redis.call('DEL', cell.key) end
  elseif cell.kind == WINDOW then
    cell.this, cell.count, cell.following = 0, 0, 0
  else
    cell.empty, cell.part = 0, 0
  end
end

-- `logs`: the place in KEYS of the first log, or none. `new_until`: what holds the cells of a tally that is not there.
local function tally_of(key, logs, m, stored_names, leases, names, records, now, before, new_until)
  local tally = { 0, 0, key = key, names = names, leases = leases or '', had_leases = leases, cells = {}, oldest = 0,
                  refreshed = 0, granted = { 0, 0 }, latest = now, new_names = stored_names ~= names }
  local count = #records / RECORD
  local at = 1
  if m then
    local _, _, refreshed, charges, lookups, oldest, first = decode('<I7I7I7I6I6I7', m)
    tally.refreshed, tally[1], tally[2], tally.oldest, at = refreshed, charges, lookups, oldest, first
  end
  if m and stored_names == names then
    for i = 1, count do
      local cell
      cell, at = cell_of(records, i, logs and KEYS[logs + i - 1], m, at)
      if cell.was then
        adopt(cell, cell.was, now, now + before + cell.window)
        tally.refreshed = 0
      end
      tally.cells[i] = cell
    end
    return tally
  end
  local known = {}
  for name in string.gmatch(m and stored_names or '', '[^|]+') do
    known[name] = at
    local heads, tails, first = decode('<I4I4', m, at + SIGNATURE + 72)
    at = first + heads + tails
  end
  tally.refreshed = 0
  local i = 0
  for name in string.gmatch(names, '[^|]+') do
    i = i + 1
    local from = known[name]
    local cell = cell_of(records, i, logs and KEYS[logs + i - 1], nil, nil)
    if from and decode('<I1', m, from) == cell.kind then
      cell = cell_of(records, i, cell.key, m, from)
      if cell.was then adopt(cell, cell.was, now, now + before + cell.window) end
    else
      adopt(cell, nil, now, m and now + before + cell.window or new_until)
    end
    tally.cells[i] = cell
  end
  return tally
end

-- An answer (with its age) or a return (with origins) is taken into account once, for permits that were leased.
local function settle(tally, now, call, cost, kind, age, origins)
  if tally.leases == '' then return end
  local name, at = encode('<I6', call), 0
  repeat
    at = string.find(tally.leases, name, at + 1, true)
    if not at then return end
  until (at - 1) % LEASE == 0
  local _, deadline, charges, lookups = decode('<I6I7I4I4', tally.leases, at)
  local outstanding = { charges, lookups }
  cost = min(cost, outstanding[kind])
  outstanding[kind] = outstanding[kind] - cost
  local left = ''
  if outstanding[1] + outstanding[2] > 0 then left = encode('<I6I7I4I4', call, deadline, outstanding[1], outstanding[2]) end
  tally.leases = sub(tally.leases, 1, at - 1) .. left .. sub(tally.leases, at + LEASE)
  tally[kind] = max(0, tally[kind] - cost)
  if cost == 0 then return end
  for i, cell in ipairs(tally.cells) do
    if cell.mode == HELD and (cell.applies == 0 or cell.applies == kind) then
      if age then
        push(cell, ceil(max(0, now - age) / 1000), cost)
      elseif origins then
        local origin = decode('<I6', ARGV[6], origins + (i - 1) * 6)
        if origin * 1000 + cell.window > now then restore(cell, now, origin, cost) end
      end
    end
  end
end

-- A lease past its deadline frees its slots: whatever its calls did, the provider has counted it a window ago.
local function expire(tally, now, lease_field)
  if tally[1] + tally[2] == 0 then tally.oldest = 0 end
  if tally[1] + tally[2] == 0 or now < tally.oldest then return end
  local oldest = 0
  local function live_of(leases)
    local live = {}
    for at = 1, #leases, LEASE do
      local _, deadline, charges, lookups = decode('<I6I7I4I4', leases, at)
      if deadline <= now then
        tally[1], tally[2] = max(0, tally[1] - charges), max(0, tally[2] - lookups)
      else
        live[#live + 1] = sub(leases, at, at + LEASE - 1)
        if oldest == 0 or deadline < oldest then oldest = deadline end
      end
    end
    return table.concat(live)
  end
  local fields = redis.call('HGETALL', tally.key)
  for i = 1, #fields, 2 do
    local field = fields[i]
    if sub(field, 1, 1) == 'c' and field ~= lease_field then
      local live = live_of(fields[i + 1])
      if live == '' then
        redis.call('HDEL', tally.key, field)
      elseif live ~= fields[i + 1] then
        redis.call('HSET', tally.key, field, live)
      end
    end
  end
  tally.leases = live_of(tally.leases)
  tally.oldest = oldest
end

-- Before the first want of a call.
local function open_cells(tally, now)
  for _, cell in ipairs(tally.cells) do
    if cell.kind == LOG then
      cell.unused = cell.max - cell.logged - (cell.mode == HELD and in_flight(tally, cell.applies) or 0)
    elseif cell.kind == WINDOW then
      roll(cell, now)
    end
  end
end

-- After the last: holds what was granted until its answer or the deadline.
local function close(tally, number, lasts, jitter)
  local charges, lookups = tally.granted[1], tally.granted[2]
  local held = false
  for _, cell in ipairs(tally.cells) do
    held = held or cell.mode == HELD
    if cell.exceeds then cell.excess = max(cell.excess, tally.latest) end
    for i = 1, cell.starts and #cell.starts or 0, 2 do
      push(cell, ceil((cell.starts[i] + jitter) / 1000), cell.starts[i + 1])
    end
  end
  if not held or charges + lookups == 0 then return end
  local deadline = tally.latest + lasts
  tally.leases = tally.leases .. encode('<I6I7I4I4', number, deadline, charges, lookups)
  tally[1], tally[2] = tally[1] + charges, tally[2] + lookups
  tally.oldest = tally.oldest == 0 and deadline or min(tally.oldest, deadline)
end

-- Writes a tally, with other fields of its hash. Chunks enter their list after the cell says so.
local function save(tally, born, now, lease_field, fields, kept, extra_ms)
  local parts, chunks = { '' }, nil
  local fresh = now >= tally.refreshed + min(REFRESH_US, kept)
  if fresh then tally.refreshed = now end
  for i, cell in ipairs(tally.cells) do
    if cell.key and #cell.tail >= CHUNK_BYTES then
      if cell.head == '' and cell.chunks == 0 then
        cell.head = cell.tail
      else
        chunks = chunks or {}
        chunks[cell] = encode('<I6', cell.base) .. cell.tail
        cell.chunks = cell.chunks + 1
      end
      cell.tail, cell.base = '', cell.pushed
    end
    local a, b, c = cell.logged or cell.this or cell.empty, cell.tail_ms or cell.count or cell.part,
                    cell.excess or cell.following or 0
    parts[#parts + 1] = cell.signature .. encode('<dddddddddI4I4', cell.held, a, b, c, cell.pushed, cell.base, cell.chunks,
                                                 cell.refused, cell.waited, #cell.head, #cell.tail)
    parts[#parts + 1] = cell.head
    parts[#parts + 1] = cell.tail
  end
  parts[1] = encode('<I7I7I7I6I6I7', now, born, tally.refreshed, tally[1], tally[2], tally.oldest)
  local n = #fields
  fields[n + 1], fields[n + 2] = 'm', table.concat(parts)
  if tally.new_names then fields[#fields + 1], fields[#fields + 2] = 'n', tally.names end
  if tally.leases ~= '' then
    fields[#fields + 1], fields[#fields + 2] = lease_field, tally.leases
  elseif tally.had_leases then
    redis.call('HDEL', tally.key, lease_field)
  end
  redis.call('HSET', tally.key, unpack(fields))
  for cell, chunk in pairs(chunks or {}) do redis.call('RPUSH', cell.key, chunk) end
  if fresh or chunks then
    local ttl = string.format('%.0f', ceil(2 * kept / 1000) + extra_ms)
    redis.call('PEXPIRE', tally.key, ttl)
    for _, cell in ipairs(tally.cells) do
      if cell.chunks > 0 then redis.call('PEXPIRE', cell.key, ttl) end
    end
  end
end

