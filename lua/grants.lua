-- The grants of one call: each request gets permits under all its limits or under none; the fourth part of the limiter's
-- library.
-- Specification: src/domain/quota/grant.rs.

local ROUNDS = 4
local MOST = 1000

-- The earliest instant at which a slot that is in flight can be used again, if its response came now.
local function earliest(cell, now)
  return now + cell.window
end

-- The cell that is held longest, of those that count a kind and are held beyond an instant for uses that the ledger may
-- know; or `found`, if that is held as long.
local function without_history(cells, kind, at, found)
  for i = 1, #cells do
    local cell = cells[i]
    if cell.since > 0 and cell.held > at and (cell.applies == 0 or cell.applies == kind)
        and (found == nil or cell.held > found.held) then
      found = cell
    end
  end
  return found
end

-- The time in µs until the ledger knows all past uses of a cell, plus 1: 0 stands for limits that know theirs.
local function readable(cell, now, in_hands)
  return max(0, cell.since + in_hands - now) + 1
end

-- The start at which all enforced limits of the provider have free slots: start and permits, with the origins in the
-- cells. Otherwise nil, the cell that refuses, its wait, and whether that is exact.
local function place(provider, cost, kind, now, limit_at)
  local cells, start = provider.cells, now
  for _ = 1, ROUNDS do
    local joint, permits, worst, worst_at, exact = start, MOST, nil, 0, 1
    for i = 1, #cells do
      local cell = cells[i]
      cell.origin = 0
      if cell.mode ~= SHADOW and (cell.applies == 0 or cell.applies == kind) then
        local from, origin, room = find(cell, cost, start)
        if from == nil then
          exact = 0
          from = earliest(cell, now)
          room = 0
        else
          from, room = apart(cell, from, room, cost, now)
        end
        if from > limit_at or room == 0 then
          if worst == nil or from > worst_at then worst, worst_at = cell, from end
        else
          cell.origin = origin
          if from > joint then joint = from end
          if room < permits then permits = room end
        end
      end
    end
    if worst then return nil, worst, worst_at - now, exact end
    -- A later start than found suits a log and a bucket too; a fixed window may be another one by then.
    if joint == start or not provider.windows then return joint, permits end
    start = joint
  end
  return nil, cells[1], start - now, 0
end

-- How many permits the request's account and reference allow at its start. Otherwise nil, the cell that refuses, its
-- wait, whether that is exact, and when its past can be read.
local function own_room(owns, cost, kind, start, permits, now, limit_at, in_hands)
  local lost
  for _, own in ipairs(owns) do lost = without_history(own.cells, kind, limit_at, lost) end
  if lost then return nil, lost, lost.held - now, 1, readable(lost, now, in_hands) end
  local worst, worst_at, exact = nil, 0, 1
  for _, own in ipairs(owns) do
    for _, cell in ipairs(own.cells) do
      if cell.mode ~= SHADOW and (cell.applies == 0 or cell.applies == kind) then
        -- A held slot that is released unused is restored as it was. So it must be free now, not only at the start.
        local begin = is_held(cell) and now or start
        local from, _, room = find(cell, cost, begin)
        local has = from == begin and room > 0
        if has then permits = min(permits, room) end
        if from == nil then
          exact = 0
          from = earliest(cell, now)
        end
        if not has and (worst == nil or from > worst_at) then worst, worst_at = cell, from end
      end
    end
  end
  if worst then return nil, worst, worst_at - now, exact, 0 end
  return permits
end

-- The number of permits that all shadow limits of a tally would treat alike.
local function shadow_room(tally, cost, kind, permits, start, limit_at)
  for _, cell in ipairs(tally.cells) do
    if cell.mode == SHADOW and (cell.applies == 0 or cell.applies == kind) then
      local from, _, room = find(cell, cost, start)
      if from and from <= limit_at and room > 0 then permits = min(permits, room) end
    end
  end
  return permits
end

local function shadow_take(tally, cost, kind, permits, start, limit_at)
  for _, cell in ipairs(tally.cells) do
    if cell.mode == SHADOW and (cell.applies == 0 or cell.applies == kind) then
      local from, _, room = find(cell, cost, start)
      if from and from <= limit_at and room > 0 then
        if from > start then cell.waited = cell.waited + permits end
        take(cell, cost * permits, from)
      else
        cell.refused = cell.refused + permits
      end
    end
  end
end

local function shadowed(provider, owns, cost, kind, permits, start, limit_at)
  permits = shadow_room(provider, cost, kind, permits, start, limit_at)
  for i = 1, owns and #owns or 0 do permits = shadow_room(owns[i], cost, kind, permits, start, limit_at) end
  shadow_take(provider, cost, kind, permits, start, limit_at)
  for i = 1, owns and #owns or 0 do shadow_take(owns[i], cost, kind, permits, start, limit_at) end
  return permits
end

local function take_all(tally, uses, kind, start)
  tally.granted[kind] = tally.granted[kind] + uses
  if start > tally.latest then tally.latest = start end
  local cells = tally.cells
  for i = 1, #cells do
    local cell = cells[i]
    if cell.mode ~= SHADOW and (cell.applies == 0 or cell.applies == kind) then take(cell, uses, start) end
  end
end

-- The deciding limit, the permits that may certainly start under it, and the time until all are free again. It is the
-- limit that refuses; otherwise the first one with the least remaining.
local function verdict(provider, now, refusing)
  local cells = provider.cells
  local decides, remaining, reset, others = 0, nil, 0, true
  for i = 1, #cells do
    local cell = cells[i]
    if cell.mode < SHADOW then
      local room, drained = outlook(provider, cell, now)
      local other = refusing ~= nil and cell.index ~= refusing
      if remaining == nil or (others and not other) or (others == other and room < remaining) then
        decides, remaining, reset, others = cell.index, room, drained, other
      end
    end
  end
  return remaining or 0, decides, reset
end

-- Collects packed runs or skipped wants: few in a string, many in a table.
local function gather(all, count, one)
  if count == 0 then return one end
  if count == 1 then return { all, one } end
  all[count + 1] = one
  return all
end

local function gathered(all, count)
  if count < 2 then return all end
  return table.concat(all)
end

-- Serves `count` wants of `text` from a position on. Returns the refusal (index, wait, exact, when its past can be
-- read; the index is nil without one), then number and packed text of the runs and of the skipped wants.
local function serve(provider, tallies, text, at, count, now, ahead)
  local in_hands = provider.horizon + provider.budget
  local limit_at = now + ahead
  local runs, runs_n, passed, passed_n, behind = '', 0, '', 0, nil
  local cells = provider.cells
  local cells_n = #cells
  local run_want, run_wait, run_origins, run_permits = -1, -1, '', 0
  local index, line_wait, line_exact, line_readable = nil, 0, 0, 0
  local lost = { without_history(cells, 1, limit_at), without_history(cells, 2, limit_at) }
  for want = 0, count - 1 do
    local left, cost, kind, owns_n, first, second
    left, cost, kind, owns_n, first, second, at = decode('<I4I2I1I1I2I2', text, at)
    if left > MOST then left = MOST end
    if cost == 0 then cost = 1 end
    local owns
    if owns_n > 0 then owns = { tallies[first], owns_n > 1 and tallies[second] or nil } end
    if behind and behind[kind] then
      passed, passed_n = gather(passed, passed_n, encode('<I2', want) .. behind[kind]), passed_n + 1
      left = 0
    end
    while left > 0 do
      local start, permits, wait, exact
      local readable_in = 0
      if lost[kind] then
        permits, wait, exact = lost[kind], lost[kind].held - now, 1
        readable_in = readable(permits, now, in_hands)
      else
        start, permits, wait, exact = place(provider, cost, kind, now, limit_at)
      end
      if not start then
        local worst = permits
        if worst.applies == 0 then
          index, line_wait, line_exact, line_readable = worst.index, wait, exact, readable_in
        else
          behind = behind or {}
          behind[kind] = encode('<I2I6I1I4', worst.index, wait, exact, readable_in)
          passed, passed_n = gather(passed, passed_n, encode('<I2', want) .. behind[kind]), passed_n + 1
        end
        break
      end
      if permits > left then permits = left end
      if owns then
        local room, worst, own_wait, own_exact, own_readable =
          own_room(owns, cost, kind, start, permits, now, limit_at, in_hands)
        if not room then
          passed = gather(passed, passed_n, encode('<I2I2I6I1I4', want, worst.index, own_wait, own_exact, own_readable))
          passed_n = passed_n + 1
          break
        end
        permits = room
      end
      if owns or provider.shadow then permits = shadowed(provider, owns, cost, kind, permits, start, limit_at) end
      take_all(provider, cost * permits, kind, start)
      if owns then
        for i = 1, owns_n do take_all(owns[i], cost * permits, kind, start) end
      end
      left = left - permits
      local origins = encode('<I6', cells[1].origin)
      for i = 2, cells_n do origins = origins .. encode('<I6', cells[i].origin) end
      if want == run_want and start - now == run_wait and origins == run_origins then
        run_permits = run_permits + permits
      else
        if run_permits > 0 then
          runs, runs_n = gather(runs, runs_n, encode('<I2I4I6', run_want, run_permits, run_wait) .. run_origins), runs_n + 1
        end
        run_want, run_wait, run_origins, run_permits = want, start - now, origins, permits
      end
    end
    if index then break end
  end
  if run_permits > 0 then
    runs, runs_n = gather(runs, runs_n, encode('<I2I4I6', run_want, run_permits, run_wait) .. run_origins), runs_n + 1
  end
  return index, line_wait, line_exact, line_readable, runs_n, gathered(runs, runs_n), passed_n, gathered(passed, passed_n)
end
