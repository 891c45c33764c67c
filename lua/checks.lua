-- Whether what is stored can be what was written: it may have been overwritten or put back by somebody else; the third part
-- of the limiter's library.
--
-- Of each quota's state the library remembers what it wrote last, for as long as Redis keeps it loaded, and takes nothing
-- else for it. What it does not remember (it was loaded anew, another version of the program wrote meanwhile) must lie
-- within what settings allow and add up. So must accounts and references, but for those that were used lately and are as they
-- were written.

-- No instant of a use, deadline or hold lies further ahead, but for a window: booking horizon, send budget, timeout,
-- allowance for jitter and change of the holder, each at its greatest.
local LEAD_MAX = 1000000000
-- The longest that a use can count, the longest pause, and the furthest that Redis' clock may have gone back; in µs.
local LONGEST_MAX, PAUSE_MAX, BACK_MAX = 5443200000000, 902000000, 86400000000
-- A log's instants are rounded up by so much at most.
local GRANULE_MAX = 10462500000
local REMEMBERED_MOST = 1000

-- What `pcall` caught, as text; an error of Redis is a table in some of its versions.
local function problem_in(caught)
  return type(caught) == 'table' and caught.err or caught
end

-- Whether a problem is Redis' own, which begins with a code, and says nothing of what is stored. One of another type than ours is
-- not.
local function is_of_redis(problem)
  return find_text(problem, '^%u+ ') and not find_text(problem, 'WRONGTYPE', 1, true)
end

-- By the state's key: m, k and s of its hash as they were written last, of the state that was born then, and callers' fields.
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

-- By their keys: m of accounts and references.
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

-- Uses in a string of entries, which are in order and not later than a millisecond.
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
  -- The middle of a log that a limit had under another name is out of reach.
  local reachable = cell.chunks == 0 or cell.key ~= nil
  local in_head, in_tail = uses_in(cell.head, latest) - cell.spent, uses_in(cell.tail, latest)
  if (reachable and in_head ~= older + first) or in_tail ~= cell.pushed - cell.open_uses - cell.base
      or (cell.open_uses > 0 and cell.open_ms > latest) or in_head < 0 then
    damaged = 'uses of a log'
  end
end

-- What a cell has counted, as of an instant that is not before its last call.
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
