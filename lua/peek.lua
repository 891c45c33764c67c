-- Reads the usage in one hash of the limiter, and acquires, releases and writes nothing; the seventh part of the
-- limiter's library.
--
-- KEYS  the state as in quota.lua; then the logs of the provider's cells, or the hash of one subject
-- ARGV  joined by "|": scope (0 the provider's), resumed at, then of each cell its name and its window; the provider's in the
--   order of the logs' keys; window 0 for a shadow limit
-- REPLY  for each cell, except one with a list of chunks whose key is not here: name, uses that count now (with those
--   in flight), permits that a shadow limit would have refused, permits that it would have delayed, µs until the next
--   permit may start, µs until all is free again, uses that still count after each sixteenth of the window (empty unless
--   it is a log with uses and a window of 10 s or more); before them the same of the state, whose name is empty; empty
--   if there is no state
-- EXAMPLE  100/1s, 3 answered just now and 2 in flight
--   0|0|per-second|1002500 → "" 0 0 0 0 0 {} per-second 5 0 0 0 1002500 {}

local STILL_USED_STEPS = 16
local STILL_USED_WINDOW_MIN_US = 10000000

-- Number of uses whose window is over, in a string of entries from a position on; and whether all of them are over.
local function over(text, from, window, now)
  local uses = 0
  for i = from, #text, 8 do
    local ms, count = decode('<I5I3', text, i)
    if (ms + BASE_MS) * 1000 + window > now then return uses, false end
    uses = uses + count
  end
  return uses, true
end

-- Number of uses that count now. Entries are in order: if the first entry of a chunk is over, all chunks before it are.
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

-- Uses of a log that still count after each part of the window, with those in flight.
local function still_used(tally, cell, now)
  local uses = {}
  for step = 1, STILL_USED_STEPS do
    uses[step] = counted(cell, now + floor(cell.window * step / STILL_USED_STEPS)) + flying(tally, cell)
  end
  return uses
end

-- The start of the next permit of cost 1, from an instant on. Calls in flight count as if their response came now.
local function next_start(tally, cell, now, from)
  if cell.max == 0 then return max(from, cell.held) end
  if cell.kind == LOG then cell.unused = cell.max - cell.logged - flying(tally, cell) end
  if cell.kind == SLOTS then cell.unused = cell.max - flying(tally, cell) end
  return find(cell, 1, from) or max(from, cell.held, now + cell.window)
end

-- Appends a row without uses, whose limit grants nothing before an instant.
local function add_unused(reply, name, at, now)
  for _, value in ipairs({ name, 0, 0, 0, at - now, at - now, EMPTY }) do reply[#reply + 1] = value end
end

-- The limits of a subject without a tally: held for uses that a younger state has not counted.
local function unused(reply, words, known, now, from)
  for i = 3, #words, 2 do
    local window, held = words[i + 1] + 0, 0
    if window > 0 then
      local _, last = not_of_new(known, words[1] + 0, window)
      if last > 0 then held = last + window end
    end
    add_unused(reply, words[i], max(from, held), now)
  end
  return reply
end

local function usages(keys, args)
  local clock = clock_us()
  local words = {}
  for word in string.gmatch(args[1], '[^|]+') do words[#words + 1] = word end
  local of_subject = words[1] ~= '0'
  local kept = redis.call('HMGET', keys[1], 'm', 's', 'k')
  local m, s, known_text = kept[1], kept[2], kept[3]
  if not m or not s or not known_text then return {} end
  -- A clock that went back counts as standing still.
  local _, _, born, warm, last, _, paused, resumed = decode(HEAD, m)
  local now = max(clock, last)
  -- The earliest start: later if the state is cold, or the provider named a wait that no operator has lifted.
  local from = max(now, warm, resumed == words[2] + 0 and paused or 0)
  local reply, known, touched = {}, known_of(known_text), last
  add_unused(reply, '', from, now)
  if of_subject then
    kept = redis.call('HMGET', keys[2], 'm', 's')
    m, s = kept[1], kept[2]
    if not m or not s then return unused(reply, words, known, now, from) end
    -- A hash of an older state, or one whose uses are all over, does not count.
    local _, of_born, kept_until
    _, touched, of_born, kept_until = decode(SUBJECT_HEAD, m)
    if of_born ~= born or kept_until <= now then return unused(reply, words, known, now, from) end
  end
  local names, cells, names_at = decode('<I2I2', s)
  local tally = tally_of(sub(s, names_at, names_at + names - 1), s, names_at + names, cells)
  local at = (of_subject and SUBJECT_HEAD_BYTES or HEAD_BYTES) + 1
  tally.refreshed, tally[1], tally[2], tally.oldest, at = decode(TALLY, m, at)
  load_cells(tally, m, at)
  hold_missed(tally, known, words[1] + 0, touched)
  local logs, i = {}, 0
  if not of_subject then
    for j = 3, #words, 2 do logs[words[j]] = keys[(j + 1) / 2] end
  end
  for name in string.gmatch(tally.names, '[^|]+') do
    i = i + 1
    local cell, uses, later = tally.cells[i], 0, EMPTY
    cell.key = logs[name]
    -- If the caller does not know a limit, the middle of its log cannot be read. No caller asks for it.
    if cell.key or cell.chunks == 0 then
      if cell.kind == LOG then
        uses = counted(cell, now) + flying(tally, cell)
        if uses > 0 and cell.window >= STILL_USED_WINDOW_MIN_US then later = still_used(tally, cell, now) end
      elseif cell.kind == WINDOW then
        roll(cell, now)
        uses = cell.count
      elseif cell.kind == SLOTS then
        uses = flying(tally, cell)
      else
        uses = undrained(cell, now)
      end
      local retry = next_start(tally, cell, now, from) - now
      local _, reset = outlook(tally, cell, now)
      for _, value in ipairs({ name, uses, cell.refused, cell.waited, retry, max(reset, retry), later }) do
        reply[#reply + 1] = value
      end
    end
  end
  return reply
end

local function peek(keys, args)
  if not decode then bind() end
  local went, reply = pcall(usages, keys, args)
  if went then return reply end
  if is_of_redis(problem_in(reply)) then return redis.error_reply(problem_in(reply)) end
  return redis.error_reply('DAMAGED the stored state cannot be read; the next call resets it')
end
