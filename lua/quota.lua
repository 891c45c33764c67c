-- One call to the limiter of one quota: takes permits under all its limits, all or nothing, and settles earlier ones.
-- Specification: src/domain/quota/, the same decisions in the same order; tests/contract/limiter/differential.rs compares
-- the two on random histories. One script with log.lua, cells.lua and tallies.lua, which come before.
--
-- KEYS  all under one hash tag {quota}:
--   1        state: hash; q = packed (born, warm, last, version, paused, unsure) and the run id; and a tally
--   2..1+k   log of each provider cell: list of chunks, oldest first, between the ends that the cell keeps itself
--   then     a tally for each subject: hash; n = names of its cells, m = packed (touched, charges and lookups in flight,
--            oldest deadline) and cells, c<incarnation> = leases; of the state also r<incarnation> = the last reply
-- ARGV  packed little-endian, unsigned; instants and durations in µs
--   1 run id of the server (text)
--   2 version 6, incarnation 6, number 6, grant jitter 6, longest hold 6, booking horizon 6, pause 6 (or 0),
--     distrusted born 7 (or 0), rebuilt born 7 (or 0), longest window 6, k 2, wants 2, settlements 2, subjects 2,
--     past uses 2, open uses 4, cold after a loss 6
--   3 names of the provider's cells, joined by "|"
--   4 k × (kind 1, applies 1, mode 1, window 7, offset or interval 7, granule in ms 4, max 4, index in the spec 2)
--   5 wants × (permits 4, cost 2, kind 1, subjects 1, first subject 2, second subject 2)
--   6 settlements × (call 6, cost 4, kind 1, fate 1, subjects 1, first 2, second 2, age 6; not sent: k × origin in ms 6)
--   7 past uses × (age 6, cost 4), oldest first
--   8.. for each subject: names as in 3, cells as in 4
--   kinds of cell: 0 log, 1 window, 2 bucket. applies and kinds of want: 0 all, 1 charge, 2 lookup. modes: 0 counts the
--   start, 1 held until the answer, 2 shadow, 3 pacing. fates: 0 used, 1 not sent
-- REPLY packed in the same way
--   refusal 1 (0 none, 1 limit, 2 cold, 3 paused, 4 stale version, 5 stale call), exact 1, index of the limit 2, wait 6,
--   now 7, newest version 6, born 7, remaining 4, deciding limit 2, reset 6, runs 4, passed over 2,
--   then runs × (want 2, permits 4, wait 6, k × origin in ms 6), passed over × (want 2, limit 2, wait 6, exact 1)
-- EXAMPLE  100/1s, one permit wanted on a warm empty log: one cell (0, 0, 1, 1002500, 0, 1, 100, 0) and one want
--   (1, 1, 1, 0, 0, 0) → refusal 0, remaining 99, one run (0, 1, 0, 0)
-- AFTERWARDS  nothing was written if an argument was wrong. A write that fails half-way loses slots, never makes any:
--   chunks leave a list before its cell says so and enter it after, and a chunk that is missing ends the state.

local NONE, LIMIT, COLD, PAUSED, STALE_VERSION, STALE_CALL = 0, 1, 2, 3, 4, 5
local REPLY_KEPT_US = 600000000
local SUBJECT_KEPT_US = 1000000
local ROUNDS = 4
local MOST = 1000

if #ARGV < 7 or #ARGV[2] ~= 82 then return redis.error_reply('ARGUMENT not as announced: the header') end
local version, incarnation, number, jitter, hold, horizon, pause, distrusted, rebuilt, longest, cells_n, wants_n,
  settlements_n, subjects_n, past_n, open, cold = decode('<I6I6I6I6I6I6I6I7I7I6I2I2I2I2I2I4I6', ARGV[2])
local run_id, names, records = ARGV[1], ARGV[3], ARGV[4]

local wrong = nil
if #KEYS ~= 1 + cells_n + subjects_n then wrong = 'the number of keys' end
if cells_n == 0 or #records ~= cells_n * RECORD then wrong = 'the cells' end
if #ARGV[5] ~= wants_n * 12 or wants_n > MOST then wrong = 'the wants' end
if settlements_n > MOST or #ARGV[6] < settlements_n * 23 then wrong = 'the settlements' end
if #ARGV[7] ~= past_n * 10 or past_n > MOST then wrong = 'the past uses' end
if #ARGV ~= 7 + 2 * subjects_n then wrong = 'the number of arguments' end
for i = 1, subjects_n do
  if not wrong and (#ARGV[7 + 2 * i] == 0 or #ARGV[7 + 2 * i] % RECORD ~= 0) then wrong = 'the cells of a subject' end
end
if wrong or number == 0 then
  return redis.error_reply('ARGUMENT not as announced: ' .. (wrong or 'the call number'))
end

local state_key = KEYS[1]
local time = redis.call('TIME')
local clock = time[1] * 1000000 + time[2]
local inc = sub(ARGV[2], 7, 12)
local lease_field, reply_field = 'c' .. inc, 'r' .. inc
local stored = redis.call('HMGET', state_key, 'q', 'm', 'n', lease_field, reply_field)

-- State: as it was, or begun anew when it is missing, of another server, or not to be trusted.
local born, warm, last, known_version, paused, unsure
local quota = stored[1]
if quota and #quota > 41 and stored[2] and stored[3] then
  born, warm, last, known_version, paused, unsure = decode('<I7I7I7I6I7I7', quota)
  if sub(quota, 42) ~= run_id or born == distrusted then quota = nil end
else
  quota = nil
end
if not quota then
  if stored[1] or stored[2] then
    for i = 1, 1 + cells_n do redis.call('DEL', KEYS[i]) end
  end
  stored = {}
  born, warm, last, known_version, paused = clock, clock + cold, clock, version, 0
  unsure = warm
end
local now = max(clock, last)

local function answer(code, index, wait, exact, remaining, decides, reset, runs, passed)
  return encode('<I1I1I2I6I7I6I7I4I2I6I4I2', code, exact, index, wait, now, known_version, born, remaining, decides, reset,
    #runs, #passed) .. table.concat(runs) .. table.concat(passed)
end

-- A call that was seen before is answered as before; one that was overtaken gets nothing.
local last_reply = stored[5]
if last_reply then
  local last_number = decode('<I6', last_reply)
  if last_number == number then return sub(last_reply, 14) end
  if last_number > number then return answer(STALE_CALL, 0, 0, 0, 0, 0, 0, {}, {}) end
end
-- Older settings may not know every limit that a settlement must reach, so nothing is done for their holder.
if version < known_version then return answer(STALE_VERSION, 0, 0, 0, 0, 0, 0, {}, {}) end
if not last_reply and quota then
  local fields = redis.call('HGETALL', state_key)
  for i = 1, #fields, 2 do
    if sub(fields[i], 1, 1) == 'r' then
      local _, at = decode('<I6I7', fields[i + 1])
      if at + REPLY_KEPT_US <= now then redis.call('HDEL', state_key, fields[i]) end
    end
  end
end
last = now
known_version = version

-- Tallies: the provider's, whose limits are as the caller knows them, and one for each subject.
local function begin_anew(why)
  for i = 1, 1 + cells_n do redis.call('DEL', KEYS[i]) end
  return redis.error_reply('DAMAGED ' .. why .. '; the state begins anew')
end
local before = horizon + hold
local whole, provider = pcall(tally_of, state_key, 2, stored[2], stored[3], stored[4], names, records, now, before, 0)
if not whole then return begin_anew('the state cannot be read') end
local tallies = {}
for i = 1, subjects_n do
  local key = KEYS[1 + cells_n + i]
  local kept = redis.call('HMGET', key, 'm', 'n', lease_field)
  -- What is older than all its uses would have expired; what is of an older state says nothing of what this one lost.
  if kept[1] and (#kept[1] < 40 or not kept[2] or decode('<I7', kept[1], 8) ~= born
                  or decode('<I7', kept[1]) + before + longest + SUBJECT_KEPT_US <= now) then
    redis.call('DEL', key)
    kept = {}
  end
  tallies[i] = tally_of(key, nil, kept[1], kept[2], kept[3], ARGV[6 + 2 * i], ARGV[7 + 2 * i], now, before, unsure)
  tallies[i].known = kept[1]
end

local at = 1
for _ = 1, settlements_n do
  local call, cost, kind, fate, owns, first, second, age = decode('<I6I4I1I1I1I2I2I6', ARGV[6], at)
  at = at + 23
  settle(provider, now, call, cost, kind, fate == 0 and age, at)
  if owns > 0 then settle(tallies[first], now, call, cost, kind, fate == 0 and age, nil) end
  if owns > 1 then settle(tallies[second], now, call, cost, kind, fate == 0 and age, nil) end
  if fate == 1 then at = at + 6 * cells_n end
end
expire(provider, now, lease_field)
for i = 1, subjects_n do expire(tallies[i], now, lease_field) end

if pause > 0 then paused = max(paused, now + pause) end
if rebuilt == born and now < warm then
  warm = now
  if past_n == 0 and open == 0 then unsure = 0 end
  for _, cell in ipairs(provider.cells) do
    for i = 0, past_n - 1 do
      local age, cost = decode('<I6I4', ARGV[7], i * 10 + 1)
      recall(cell, now, now - age, cost)
    end
    if open > 0 then recall(cell, now, now + before, open) end
  end
end

local function grant()
  local cells = provider.cells
  open_cells(provider, now)
  for i = 1, subjects_n do open_cells(tallies[i], now) end
  local limit_at, windows = now + horizon, false
  for i = 1, cells_n do windows = windows or cells[i].kind == WINDOW end
  local runs, passed, behind = {}, {}, {}
  local last_want, last_wait, last_origins, last_permits = -1, -1, '', 0
  local code, index, wait, exact = NONE, 0, 0, 0

  local function earliest(tally, cell, cost)
    if cell.max >= cost and tally.oldest > now then return min(now + cell.window, tally.oldest) end
    return now + cell.window
  end

  -- Where every enforced limit on everything has room: start, origins, permits; or nil and what refuses.
  local function place(cost, kind)
    local start = now
    for _ = 1, ROUNDS do
      local joint, permits, worst, worst_at, all = start, MOST, nil, 0, 1
      local origins = {}
      for i = 1, cells_n do
        local cell = cells[i]
        origins[i] = 0
        if cell.mode ~= SHADOW and (cell.applies == 0 or cell.applies == kind) then
          local from, origin, room = find(cell, cost, start)
          local refuses = from == nil or from > limit_at or room == 0
          if from == nil then
            all = 0
            from = earliest(provider, cell, cost)
          end
          if refuses and (worst == nil or from > worst_at) then worst, worst_at = cell, from end
          if not refuses then
            origins[i] = origin
            joint = max(joint, from)
            permits = min(permits, room)
          end
        end
      end
      if worst then return nil, worst, worst_at - now, all end
      if joint == start or not windows then return joint, origins, permits end
      start = joint
    end
    return nil, cells[1], start - now, 0
  end

  -- How many permits a want's own account and reference have room for at its start; or nil and what refuses.
  local function own_room(owns, cost, kind, start, permits)
    local worst, worst_at, all = nil, 0, 1
    for _, own in ipairs(owns) do
      for _, cell in ipairs(own.cells) do
        if cell.mode ~= SHADOW and (cell.applies == 0 or cell.applies == kind) then
          local from, _, room = find(cell, cost, start)
          local has = from == start and room > 0
          if has then permits = min(permits, room) end
          if from == nil then
            all = 0
            from = earliest(own, cell, cost)
          end
          if not has and (worst == nil or from > worst_at) then worst, worst_at = cell, from end
        end
      end
    end
    if worst then return nil, worst, worst_at - now, all end
    return permits
  end

  local function shadowed(counted, cost, kind, permits, start)
    for _, tally in ipairs(counted) do
      for _, cell in ipairs(tally.cells) do
        if cell.mode == SHADOW and (cell.applies == 0 or cell.applies == kind) then
          local from, _, room = find(cell, cost, start)
          if from and from <= limit_at and room > 0 then permits = min(permits, room) end
        end
      end
    end
    for _, tally in ipairs(counted) do
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
    return permits
  end

  local function pass(want, by)
    passed[#passed + 1] = encode('<I2I2I6I1', want, by.index, by.wait, by.exact)
  end

  local function flush()
    if last_permits > 0 then
      runs[#runs + 1] = encode('<I2I4I6', last_want, last_permits, last_wait) .. last_origins
      last_permits = 0
    end
  end

  for want = 0, wants_n - 1 do
    local left, cost, kind, owns_n, first, second = decode('<I4I2I1I1I2I2', ARGV[5], want * 12 + 1)
    local owns, counted = {}, { provider }
    if owns_n > 0 then owns[1], counted[2] = tallies[first], tallies[first] end
    if owns_n > 1 then owns[2], counted[3] = tallies[second], tallies[second] end
    left, cost = min(left, MOST), max(cost, 1)
    if behind[kind] then
      pass(want, behind[kind])
      left = 0
    end
    while left > 0 do
      local start, origins, permits, all = place(cost, kind)
      if not start then
        if origins.applies == 0 then
          code, index, wait, exact = LIMIT, origins.index, permits, all
        else
          behind[kind] = { index = origins.index, wait = permits, exact = all }
          pass(want, behind[kind])
        end
        break
      end
      permits = min(permits, left)
      if owns_n > 0 then
        local room, by, own_wait, own_exact = own_room(owns, cost, kind, start, permits)
        if not room then
          pass(want, { index = by.index, wait = own_wait, exact = own_exact })
          break
        end
        permits = room
      end
      if has_shadow then permits = shadowed(counted, cost, kind, permits, start) end
      for _, tally in ipairs(counted) do
        tally.granted[kind] = tally.granted[kind] + cost * permits
        tally.latest = max(tally.latest, start)
        for _, cell in ipairs(tally.cells) do
          if cell.mode ~= SHADOW and (cell.applies == 0 or cell.applies == kind) then take(cell, cost * permits, start) end
        end
      end
      left = left - permits
      for i = 1, cells_n do origins[i] = encode('<I6', origins[i]) end
      origins = table.concat(origins)
      if want ~= last_want or start - now ~= last_wait or origins ~= last_origins then
        flush()
        last_want, last_wait, last_origins = want, start - now, origins
      end
      last_permits = last_permits + permits
    end
    if code ~= NONE then break end
  end
  flush()
  close(provider, number, hold + longest, jitter)
  for i = 1, subjects_n do close(tallies[i], number, hold + longest, jitter) end
  -- The refusing limit decides; else the first of those with the least remaining.
  local decides, remaining, reset, others = 0, nil, 0, true
  for i = 1, cells_n do
    local cell = cells[i]
    if cell.mode < SHADOW then
      local room, drained = outlook(provider, cell, now)
      local other = code ~= NONE and cell.index ~= index
      if remaining == nil or (others and not other) or (others == other and room < remaining) then
        decides, remaining, reset, others = cell.index, room, drained, other
      end
    end
  end
  return answer(code, index, wait, exact, remaining or 0, decides, reset, runs, passed)
end

local reply
if now < warm then
  reply = answer(COLD, 0, warm - now, 0, 0, 0, 0, {}, {})
elseif now < paused then
  reply = answer(PAUSED, 0, paused - now, 0, 0, 0, 0, {}, {})
else
  reply = grant()
end
if damaged then return begin_anew('a log does not add up') end
save(provider, born, now, lease_field, { 'q', encode('<I7I7I7I6I7I7', born, warm, last, version, paused, unsure) .. run_id,
                                         reply_field, encode('<I6I7', number, now) .. reply }, longest + before, KEPT_MS)
for i = 1, subjects_n do
  local tally = tallies[i]
  if tally.known or tally.granted[1] + tally.granted[2] > 0 then
    save(tally, born, now, lease_field, {}, longest + before + SUBJECT_KEPT_US, 0)
  end
end
return reply
