-- The counter of one limit (a cell), for each algorithm; the second part of the limiter's library.
-- Specification: src/domain/quota/{cells,counters,start_spread,counter}.rs.

local PARTS = 1024
local DEBT_PARTS = 8
local LOG, WINDOW, BUCKET, SLOTS = 0, 1, 2, 3
local STARTED, HELD, SHADOW, PACING = 0, 1, 2, 3
-- The longest time from a use until its bucket is empty, in µs: half of what the reply's field for the wait can hold.
local AHEAD_MAX = 140737488355328
local CROWD_LEAST, SPREAD_PART, SPREAD_MAX_MS = 2, 2, 500

local function roll(cell, now)
  local index = floor((now - cell.param) / cell.window)
  if index == cell.this then return end
  cell.count = index == cell.this + 1 and cell.following or 0
  cell.this, cell.following = index, 0
end

local function backlog(cell, at)
  if at > cell.empty then return 0 end
  return (cell.empty - at) * PARTS + cell.part
end

-- Permits that have not drained yet, rounded up. It is exact where the backlog is not, because a number times 1024 has
-- no more significant digits.
local function undrained(cell, at)
  if at > cell.empty then return 0 end
  local per, parts = max(1, cell.param), (cell.empty - at) * PARTS
  local rest = fmod(parts, per)
  return floor((parts - rest) / per + 0.5) + ceil((rest + cell.part) / per)
end

-- Adds uses to a bucket; returns whether all of them could be counted.
local function drain_later(cell, start, uses)
  if start > cell.empty or (start == cell.empty and cell.part == 0) then cell.empty, cell.part = start, 0 end
  local part = cell.part + uses * (cell.param % PARTS)
  local empty = cell.empty + uses * floor(cell.param / PARTS) + floor(part / PARTS)
  local fits = empty <= start + AHEAD_MAX
  if fits then cell.empty, cell.part = empty, part % PARTS else cell.empty, cell.part = start + AHEAD_MAX, 0 end
  return fits
end

-- The earliest start at which a cost fits: start, youngest origin in ms, and how many permits of this cost may start
-- then on the same terms (0: too far ahead to be booked). Returns nil if that is unknown.
local function find(cell, cost, from)
  if cell.held > from then from = cell.held end
  if cell.kind == LOG then
    local unused = cell.unused
    if unused > 0 and cell.excess > from then from = cell.excess end
    local missing = cost - unused
    if missing <= 0 then return from, 0, floor(unused / cost) end
    if missing > cell.logged then return nil end
    local ms, count, before = seek(cell, missing)
    local over = ms * 1000 + cell.window
    if over > from then from = over end
    return from, ms, (before == 0 and unused == 0) and floor(count / cost) or 1
  end
  if cell.kind == WINDOW then
    if cost > cell.max then return nil end
    while true do
      local index = floor((from - cell.param) / cell.window)
      local counted = cell.count
      if index == cell.this + 1 then counted = cell.following elseif index > cell.this then return from, 0, 0 end
      local room = floor(max(0, cell.max - counted) / cost)
      if room > 0 then return from, 0, room end
      from = (index + 1) * cell.window + cell.param
    end
  end
  if cell.kind == SLOTS then
    local room = floor(max(0, cell.unused) / cost)
    if room == 0 then return nil end
    return from, 0, room
  end
  -- Starts that are spaced need a part of the bucket, and one may cost more than there is.
  local needed = cell.mode == PACING and ceil(cell.max / DEBT_PARTS) or cost
  if needed > cell.max then return nil end
  from = max(from, cell.empty + ceil((cell.part - (cell.max - needed) * cell.param) / PARTS))
  local room = floor((cell.max * cell.param - backlog(cell, from)) / (cost * cell.param))
  if cell.mode == PACING then room = max(1, room) end
  return from, 0, room
end

-- Begins to spread starts, behind the latest start in the log. How many uses earlier calls have there is not known.
local function open_crowd(cell, jitter, latest)
  cell.most = 0
  if cell.kind ~= LOG or cell.mode ~= STARTED or cell.granule ~= 1 or jitter == 0 then return end
  local spread = min(max(floor(cell.window / 1000 / SPREAD_PART), 1), SPREAD_MAX_MS)
  cell.most = max(ceil(cell.max / spread), CROWD_LEAST)
  cell.crowd_ms, cell.crowd_uses = max(0, cell.tail_ms - ceil(jitter / 1000)), 0
  -- Logged under a larger allowance. Nothing is booked so far ahead, so this is no start.
  if cell.crowd_ms > ceil(latest / 1000) then cell.crowd_ms = 0 end
end

-- The start that spreads simultaneous starts, and how many permits may start then.
local function apart(cell, from, room, cost, now)
  local most, uses, ms = cell.most, cell.crowd_uses, cell.crowd_ms
  if most == 0 or from > now then return from, room end
  if uses > 0 and uses + cost > most then ms = ms + 1 end
  local start = from
  if ceil(from / 1000) < ms then start = ms * 1000 end
  local left = most
  if ceil(start / 1000) == cell.crowd_ms then left = max(0, most - uses) end
  return start, min(room, max(1, floor(left / cost)))
end

local function take(cell, uses, start)
  -- Its hold is over, and a history from the ledger would not contain this use.
  cell.since = 0
  if cell.kind == LOG then
    local missing = uses - cell.unused
    if cell.unused < 0 then cell.exceeds = true end
    if missing > 0 then
      cell.unused = 0
      forget_oldest(cell, missing)
    else
      cell.unused = -missing
    end
    if cell.mode ~= HELD then
      local starts = cell.starts or {}
      starts[#starts + 1], starts[#starts + 2] = start, uses
      cell.starts = starts
      if cell.most > 0 then
        local ms = ceil(start / 1000)
        if ms > cell.crowd_ms then cell.crowd_ms, cell.crowd_uses = ms, 0 end
        cell.crowd_uses = cell.crowd_uses + uses
      end
    end
  elseif cell.kind == WINDOW then
    if floor((start - cell.param) / cell.window) == cell.this then
      cell.count = cell.count + uses
    else
      cell.following = cell.following + uses
    end
  elseif cell.kind == SLOTS then
    cell.unused = cell.unused - uses
  else
    drain_later(cell, start, uses)
  end
end

-- Counts past uses, at most as many as fill the bucket: uses under another interval or limit could otherwise add up to
-- hours. Returns whether a full bucket could be counted.
local function recall_drained(cell, instant, uses)
  local empty, part = cell.empty, cell.part
  local full = { empty = 0, part = 0, param = cell.param }
  local counted = drain_later(cell, instant, uses)
  local can_be_full = drain_later(full, instant, cell.mode == PACING and max(uses, cell.max) or cell.max)
  local function later(at, at_part) return at > full.empty or (at == full.empty and at_part > full.part) end
  if not later(cell.empty, cell.part) then return counted end
  if later(empty, part) then cell.empty, cell.part = empty, part else cell.empty, cell.part = full.empty, full.part end
  return can_be_full
end

-- Counts a past request from the ledger. One that has ended holds no slot.
local function recall(cell, now, instant, uses)
  if cell.kind == SLOTS then return end
  if cell.kind == LOG then
    push(cell, ceil(instant / 1000), uses)
  elseif cell.kind == WINDOW then
    roll(cell, now)
    if floor((instant - cell.param) / cell.window) >= cell.this then cell.count = cell.count + uses end
  elseif not recall_drained(cell, instant, uses) then
    cell.held = max(cell.held, now + AHEAD_MAX)
  end
end

local function in_flight(tally, applies)
  if applies == 0 then return tally[1] + tally[2] end
  return tally[applies]
end

-- Whether uses hold a cell's slots until their response. Slots are all that is in flight, whatever the mode.
local function is_held(cell) return cell.mode == HELD or cell.kind == SLOTS end

-- Uses in flight that hold a cell's slots.
local function flying(tally, cell)
  if not is_held(cell) then return 0 end
  return in_flight(tally, cell.applies) + cell.unleased
end

-- Counts all past requests from the ledger. A cell that counts starts also counts those in flight, as started now.
local function recall_all(cell, now, text, past)
  for i = 0, past.uses - 1 do
    local age, charges, lookups = decode('<I6I4I4', text, past.at + i * 14)
    local uses = in_flight({ charges, lookups }, cell.applies)
    if uses > 0 then recall(cell, now, max(0, now - age), uses) end
  end
  local started = in_flight(past.open, cell.applies)
  if started > 0 and not is_held(cell) then recall(cell, now, now, started) end
end

-- Permits that may certainly start now, and the time in µs until all are free again.
local function outlook(tally, cell, now)
  if cell.kind == LOG then
    local held = flying(tally, cell)
    local over = cell.tail_ms * 1000 + cell.window
    local counted, reset = held, 0
    if cell.logged > 0 and over > now then counted, reset = held + cell.logged, over - now end
    if held > 0 then reset = max(reset, cell.window) end
    return max(0, cell.max - counted), reset
  end
  if cell.kind == WINDOW then
    local begin = floor((now - cell.param) / cell.window) * cell.window + cell.param
    local windows = cell.following > 0 and 2 or cell.count > 0 and 1 or 0
    return max(0, cell.max - cell.count), max(0, begin + windows * cell.window - now)
  end
  if cell.kind == SLOTS then
    local held = flying(tally, cell)
    return max(0, cell.max - held), held > 0 and cell.window or 0
  end
  local drained = now > cell.empty and 0 or cell.empty - now + ceil(cell.part / PARTS)
  return floor(max(0, cell.max * cell.param - backlog(cell, now)) / max(1, cell.param)), drained
end

-- Discards a cell's uses. Uses that a booked start has removed still occupy slots that were never used.
local function clear(cell)
  if cell.key and cell.kind == LOG then redis.call('DEL', cell.key) end
  cell.head, cell.tail, cell.pushed, cell.base, cell.chunks = '', '', 0, 0, 0
  cell.spent, cell.open_ms, cell.open_uses = 0, 0, 0
  cell.logged, cell.tail_ms = 0, 0
  cell.this, cell.count, cell.following = 0, 0, 0
  cell.empty, cell.part = 0, 0
end

-- Holds a cell because uses that were granted before `since` are not counted; the last of them may begin to count at
-- `last`. Nothing starts until a history tells of them, or they have left the window. A shadow limit is not held.
local function hold(cell, since, last)
  if last == 0 or cell.mode == SHADOW then return end
  cell.held, cell.since = max(cell.held, last + cell.window), max(cell.since, since)
end

-- Resets a cell to one that has counted everything but those uses.
local function reset(cell, since, last)
  clear(cell)
  cell.held, cell.since, cell.unleased, cell.unleased_until = 0, 0, 0, 0
  cell.refused, cell.waited, cell.excess = 0, 0, 0
  hold(cell, since, last)
end

-- Replaces a cell's uses by the ledger's history, if that covers everything that the cell needs.
local function seed(cell, now, text, past, open_until)
  if cell.since == 0 or cell.held <= now or cell.since > past.as_of or cell.window > past.within then return false end
  cell.held, cell.since = 0, 0
  clear(cell)
  recall_all(cell, now, text, past)
  if is_held(cell) then cell.unleased, cell.unleased_until = in_flight(past.open, cell.applies), open_until end
  return true
end

-- Takes over the uses of another cell for the same limit. If that cell counted in another way, its uses are unusable.
-- Uses beyond a lowered limit stay: they still count, and would count again if the limit were raised.
local function adopt(cell, old, now, since, last)
  local unchanged = old ~= nil and old.kind == cell.kind and old.applies == cell.applies and old.mode == cell.mode
    and old.window == cell.window and old.param == cell.param and old.granule == cell.granule and old.max == cell.max
  local same = old ~= nil and old.kind == cell.kind and old.applies == cell.applies
  -- A shadow limit did not count what it would have refused.
  if same and old.mode == SHADOW and cell.mode ~= SHADOW then same = false end
  if same and cell.kind == LOG then same = (old.mode == HELD) == (cell.mode == HELD) end
  if same and cell.kind == WINDOW then same = old.window == cell.window and old.param == cell.param end
  if not same then return reset(cell, since, last) end
  cell.held, cell.since, cell.unleased, cell.unleased_until = old.held, old.since, old.unleased, old.unleased_until
  cell.refused, cell.waited = old.refused, old.waited
  cell.head, cell.tail, cell.pushed, cell.base, cell.chunks = old.head, old.tail, old.pushed, old.base, old.chunks
  cell.spent, cell.open_ms, cell.open_uses = old.spent, old.open_ms, old.open_uses
  cell.logged, cell.tail_ms, cell.excess = old.logged, old.tail_ms, old.excess
  cell.this, cell.count, cell.following = old.this, old.count, old.following
  cell.empty, cell.part = old.empty, old.part
  if unchanged then return end
  local counted, unknown_until = true, last + cell.window
  if cell.kind == BUCKET and cell.param ~= old.param then
    -- More than the capacity, if starts are booked ahead or the capacity was lowered.
    local uses = undrained(old, now)
    cell.empty, cell.part = now, 0
    counted = drain_later(cell, now, uses)
  elseif cell.kind == LOG and old.window < cell.window then
    cell.held, cell.since = unknown_until, max(cell.since, since)
  end
  -- A new cell would not have to wait longer.
  cell.held = min(cell.held, unknown_until)
  -- More was used than can be counted, so it waits for the longest time.
  if not counted then cell.held = max(cell.held, now + AHEAD_MAX) end
  if cell.mode == SHADOW then cell.held, cell.since = 0, 0 end
end
