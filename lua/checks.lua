-- Checks that the stored state was written by this library, and not changed or restored by another program; the third
-- part of the limiter's library.
--
-- While Redis keeps the library loaded, it remembers what it wrote last of each quota's state, and accepts nothing
-- else. After a reload, or a write of another version of the program, it does not remember. Then the state must be
-- consistent and within what settings allow. The same holds for accounts and references that were not used recently.

-- The furthest that a use, deadline or hold may lie ahead, besides a window: booking horizon, send budget, timeout,
-- allowance for jitter and change of the limiter leader, each at its maximum.
local LEAD_MAX = 1000000000
-- The longest that a use can count, the longest pause, and the furthest that Redis' clock may have gone back; in µs.
local LONGEST_MAX, PAUSE_MAX, BACK_MAX = 5443200000000, 902000000, 86400000000
-- The most by which a log's instants are rounded up.
local GRANULE_MAX = 10462500000
local REMEMBERED_MOST = 1000

-- The text of an error that `pcall` caught; some versions of Redis raise a table.
local function problem_in(caught)
  return type(caught) == 'table' and caught.err or caught
end

-- Whether an error is one of Redis itself, which begins with a code and is no fault of the stored state. A key of
-- another type is a fault of the state.
local function is_of_redis(problem)
  return find_text(problem, '^%u+ ') and not find_text(problem, 'WRONGTYPE', 1, true)
end

-- Remembered states by key: when the state began, and m, k, s and the callers' fields of its hash as last written.
local remembered, remembered_before, remembered_count = {}, {}, 0

local function memory_of(key)
  return remembered[key] or remembered_before[key]
end

local function new_memory(key, born)
  if remembered_count >= REMEMBERED_MOST then remembered, remembered_before, remembered_count = {}, remembered, 0 end
  local memory = { born = born, own = {} }
  if not remembered[key] then remembered_count = remembered_count + 1 end
  remembered[key] = memory
  return memory
end

-- Remembered accounts and references by key: field m as last written.
local subjects_now, subjects_before, subjects_count = {}, {}, 0

local function is_remembered(key, state)
  return (subjects_now[key] or subjects_before[key]) == state
end

local function remember_subject(key, state)
  if not subjects_now[key] then
    if subjects_count >= REMEMBERED_MOST then subjects_now, subjects_before, subjects_count = {}, subjects_now, 0 end
    subjects_count = subjects_count + 1
  end
  subjects_now[key] = state
end

-- Number of uses in a string of entries. Entries must be in order, and none later than `latest_ms`.
local function uses_in(text, latest_ms)
  local uses, before = 0, 0
  for at = 1, #text, 8 do
    local ms, count = decode('<I5I3', text, at)
    if ms < before or ms + BASE_MS > latest_ms then damaged = 'order of a log' end
    uses, before = uses + count, ms
  end
  return uses
end

local function check_log(cell)
  local latest = cell.tail_ms
  local older, first = cell.logged - cell.pushed, cell.base
  if cell.chunks > 0 and cell.key then
    local chunk = redis.call('LINDEX', cell.key, integer(0))
    if not chunk or redis.call('LLEN', cell.key) ~= cell.chunks then damaged = 'chunks of a log' end
    if chunk then first = decode('<I6', chunk) end
  end
  -- The middle of a log that a limit had under another name cannot be read.
  local reachable = cell.chunks == 0 or cell.key ~= nil
  local in_head, in_tail = uses_in(cell.head, latest) - cell.spent, uses_in(cell.tail, latest)
  if (reachable and in_head ~= older + first) or in_tail ~= cell.pushed - cell.open_uses - cell.base
      or (cell.open_uses > 0 and cell.open_ms > latest) or in_head < 0 then
    damaged = 'uses of a log'
  end
end

-- Checks a cell's counts; `now` is not before its last call.
local function check_cell(cell, now)
  local latest = now + LEAD_MAX
  local ahead = cell.kind == BUCKET and AHEAD_MAX or cell.window
  if cell.held > latest + ahead or cell.since > latest or cell.unleased_until > latest then damaged = 'instants of a limit' end
  if cell.kind == LOG then
    if cell.tail_ms * 1000 > latest + GRANULE_MAX or cell.excess > latest then damaged = 'instants of a log' end
    check_log(cell)
  elseif cell.kind == WINDOW then
    if cell.this > floor((now - cell.param) / cell.window) then damaged = 'number of a window' end
  elseif cell.empty > latest + AHEAD_MAX or cell.part >= PARTS then
    damaged = 'instant of a bucket'
  end
end
