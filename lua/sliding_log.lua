-- The carousel: takes permits under several limits, all or nothing, and settles earlier ones, in one atomic call.
-- Each slot is held from grant until a window after the answer. Specification: src/domain/sliding_log.rs, the same
-- statements in the same order; tests/contract/limiter.rs compares the two on random histories.
--
-- KEYS  all under one hash tag {quota}:
--   1        meta: hash; run, born, warm, last, version, paused, oldest (deadline), in_flight, fields (of leases),
--            limits (names joined by "|"), l:<name> = window|entries|logged|held_until|tail_ms|excess_until
--   2        leases: hash; c:<incarnation>:<call> = deadline|outstanding, r:<incarnation> = packed last reply
--   3..2+k   log of each limit: list, oldest first, of (ms - BASE_MS) * 4096 + count
-- ARGV  integers unless noted; instants and durations in µs
--   1 run id of the server (text)    2 settings version        3 incarnation (text)       4 call number, from 1
--   5 grant jitter, or -1: hold      6 longest hold            7 booking horizon          8 pause, or 0
--   9 born instant vouched warm, or 0
--   10 k, then k × (name (text), max requests, padded window)
--   n, then n × cost
--   m, then m × (call number, cost, 0, age of the answer)
--           or  (call number, cost, 1, k × origin ms)
-- REPLY array of integers
--   1 refusal: 0 none, 1 limit, 2 cold, 3 paused, 4 stale version, 5 stale call
--   2 index of the refusing limit, from 0    3 wait until the next permit, rounded up    4 whether that is exact
--   5 now    6 newest version    7 born    8 unused slots left    9 number of runs
--   then per run: permits, wait, k × origin ms
-- EXAMPLE  100/1s, one permit wanted, nothing settled, on a warm empty log:
--   ARGV run 7 w1 1 -1 10500000 250000 0 0 1 per-second 100 1002500 1 1 0
--   → 0 0 0 0 <now> 7 <born> 99 1 1 0 0
-- AFTERWARDS  nothing was written if an argument was wrong. A write that fails half-way loses slots, never makes any:
--   slots leave the log before they are granted, and the counts are written last and checked at the next call.

local BASE_MS = 1700000000000
local COUNT = 4096
local REPLY_KEPT_US = 600000000
local RESTORE_DEPTH = 16
local IDLE_TTL_MS = 86400000
local NONE, LIMIT, COLD, PAUSED, STALE_VERSION, STALE_CALL = 0, 1, 2, 3, 4, 5

local at = 0
local wrong = nil
local function text()
  at = at + 1
  if ARGV[at] == nil then wrong = wrong or ('argument ' .. at .. ' is missing') end
  return ARGV[at] or ''
end
local function int(least, most)
  local value = tonumber(text())
  if value == nil or value ~= math.floor(value) or value < least or value > most then
    wrong = wrong or ('argument ' .. at .. ' is not an integer in range')
    return least
  end
  return value
end
local function digits(value) return string.format('%.0f', value) end

local MOST = 9007199254740991
local run_id, version, incarnation, number = text(), int(-1, MOST), text(), int(1, MOST)
local jitter, hold, horizon, pause, vouched = int(-1, MOST), int(0, MOST), int(0, MOST), int(0, MOST), int(0, MOST)
local limits, names, longest = {}, {}, 0
for i = 1, int(1, 100) do
  limits[i] = { key = KEYS[2 + i], name = text(), max = int(0, 1000000), window = int(1, MOST) }
  names[i] = limits[i].name
  longest = math.max(longest, limits[i].window)
  if limits[i].key == nil then wrong = wrong or ('key of limit ' .. i .. ' is missing') end
end
local wants, wanted = {}, 0
for i = 1, int(0, 1000) do
  wants[i] = int(1, 1000)
  wanted = wanted + wants[i]
end
local settlements = {}
for i = 1, int(0, 1000) do
  local settlement = { call = int(1, MOST), cost = int(1, 1000000), origins = {} }
  if int(0, 1) == 0 then
    settlement.age = int(0, MOST)
  else
    for j = 1, #limits do settlement.origins[j] = int(0, MOST) end
  end
  settlements[i] = settlement
end
if at ~= #ARGV then wrong = wrong or 'more arguments than announced' end
if wrong then return redis.error_reply('ARGUMENT ' .. wrong) end

local meta_key, leases_key = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local clock = time[1] * 1000000 + time[2]

-- State: read as a whole, or begun anew when it is missing, foreign or does not add up.
local fields = { 'run', 'born', 'warm', 'last', 'version', 'paused', 'oldest', 'in_flight', 'fields' }
for i = 1, #limits do fields[9 + i] = 'l:' .. limits[i].name end
local stored = redis.call('HMGET', meta_key, unpack(fields))
local function whole()
  if stored[1] ~= run_id then return false end
  for i = 2, 9 do
    if not tonumber(stored[i]) then return false end
  end
  if redis.call('HLEN', leases_key) ~= tonumber(stored[9]) then return false end
  for i, limit in ipairs(limits) do
    if stored[9 + i] then
      local window, entries, logged, held, tail, excess =
        string.match(stored[9 + i], '^(%d+)|(%d+)|(%d+)|(%d+)|(%d+)|(%d+)$')
      if not window then return false end
      limit.known = tonumber(window)
      limit.entries, limit.logged = tonumber(entries), tonumber(logged)
      limit.held, limit.tail, limit.excess = tonumber(held), tonumber(tail), tonumber(excess)
      if redis.call('LLEN', limit.key) ~= limit.entries then return false end
    end
  end
  return true
end
local state
if whole() then
  state = { born = tonumber(stored[2]), warm = tonumber(stored[3]), last = tonumber(stored[4]),
            version = tonumber(stored[5]), paused = tonumber(stored[6]), oldest = tonumber(stored[7]),
            in_flight = tonumber(stored[8]) }
else
  redis.call('DEL', unpack(KEYS))
  state = { born = clock, warm = clock + longest + hold + horizon, last = clock, version = version, paused = 0, oldest = 0,
            in_flight = 0 }
  for _, limit in ipairs(limits) do
    limit.known, limit.entries, limit.logged, limit.held, limit.tail = limit.window, 0, 0, 0, 0
    limit.excess = 0
  end
end
local now = math.max(clock, state.last)

local function entry(value)
  local n = tonumber(value)
  local count = n % COUNT
  return (n - count) / COUNT + BASE_MS, count
end
local function packed(ms, count) return digits((ms - BASE_MS) * COUNT + count) end

local function push(limit, ms, count)
  ms = math.max(ms, limit.tail)
  limit.tail = ms
  limit.logged = limit.logged + count
  if limit.entries > 0 then
    local tail_ms, tail_count = entry(redis.call('LINDEX', limit.key, -1))
    if tail_ms == ms and tail_count + count < COUNT then
      redis.call('LSET', limit.key, -1, packed(ms, tail_count + count))
      return
    end
  end
  redis.call('RPUSH', limit.key, packed(ms, count))
  limit.entries = limit.entries + 1
end

local function push_many(limit, ms, count)
  while count > 0 do
    local part = math.min(count, COUNT - 1)
    push(limit, ms, part)
    count = count - part
  end
end

local function restore(limit, ms, count)
  local place = 0
  for _, value in ipairs(redis.call('LRANGE', limit.key, 0, RESTORE_DEPTH - 1)) do
    if entry(value) >= ms then break end
    place = place + 1
  end
  local before = place > 0 and redis.call('LPOP', limit.key, place) or {}
  redis.call('LPUSH', limit.key, packed(ms, count))
  for i = #before, 1, -1 do redis.call('LPUSH', limit.key, before[i]) end
  limit.entries = limit.entries + 1
  limit.logged = limit.logged + count
  limit.tail = math.max(limit.tail, ms)
end

local function forget_oldest(limit, uses)
  uses = math.min(uses, limit.logged)
  while uses > 0 do
    local whole_entries, rest = 0, nil
    local heads = redis.call('LRANGE', limit.key, 0, 127)
    if #heads == 0 then return end
    for _, value in ipairs(heads) do
      local ms, count = entry(value)
      if count > uses then
        rest = packed(ms, count - uses)
        limit.logged = limit.logged - uses
        uses = 0
        break
      end
      whole_entries = whole_entries + 1
      limit.logged = limit.logged - count
      uses = uses - count
      if uses == 0 then break end
    end
    if whole_entries > 0 then
      redis.call('LTRIM', limit.key, whole_entries, -1)
      limit.entries = limit.entries - whole_entries
    end
    if rest then redis.call('LSET', limit.key, 0, rest) end
  end
end

local function write_state()
  local pairs_ = { 'run', run_id, 'born', digits(state.born), 'warm', digits(state.warm), 'last', digits(state.last),
                   'version', digits(state.version), 'paused', digits(state.paused), 'oldest', digits(state.oldest),
                   'in_flight', digits(state.in_flight), 'fields', redis.call('HLEN', leases_key),
                   'limits', table.concat(names, '|') }
  for _, limit in ipairs(limits) do
    pairs_[#pairs_ + 1] = 'l:' .. limit.name
    pairs_[#pairs_ + 1] = table.concat({ digits(limit.known), digits(limit.entries), digits(limit.logged),
                                         digits(limit.held), digits(limit.tail), digits(limit.excess) }, '|')
  end
  redis.call('HSET', meta_key, unpack(pairs_))
  local ttl = digits(math.ceil((longest + hold + horizon) / 1000) + IDLE_TTL_MS)
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl) end
end

local function answer(code, index, wait, exact, unused, runs)
  local reply = { code, index, wait, exact, now, state.version, state.born, unused, #runs }
  for _, run in ipairs(runs) do
    reply[#reply + 1] = run.permits
    reply[#reply + 1] = run.wait
    for _, origin in ipairs(run.origins) do reply[#reply + 1] = origin end
  end
  return reply
end

-- A call that was seen before is answered as before; one that was overtaken gets nothing.
local reply_field = 'r:' .. incarnation
local function purge_replies()
  local field = nil
  for i, value in ipairs(redis.call('HGETALL', leases_key)) do
    if i % 2 == 1 then
      field = value
    elseif string.sub(field, 1, 2) == 'r:' and cmsgpack.unpack(value)[2] + REPLY_KEPT_US <= now then
      redis.call('HDEL', leases_key, field)
    end
  end
end
local last_reply = redis.call('HGET', leases_key, reply_field)
if last_reply then
  last_reply = cmsgpack.unpack(last_reply)
  if last_reply[1] == number then return last_reply[3] end
  if last_reply[1] > number then return answer(STALE_CALL, 0, 0, 0, 0, {}) end
end
-- Older settings may not know every limit that a settlement must reach, so nothing is done for their holder.
if version < state.version then return answer(STALE_VERSION, 0, 0, 0, 0, {}) end
if not last_reply then purge_replies() end
state.last = now

for _, settlement in ipairs(settlements) do
  local field = 'c:' .. incarnation .. ':' .. digits(settlement.call)
  local lease = redis.call('HGET', leases_key, field)
  if lease then
    local deadline, outstanding = string.match(lease, '^(%d+)|(%d+)$')
    local cost = math.min(settlement.cost, tonumber(outstanding))
    local left = tonumber(outstanding) - cost
    if left == 0 then
      redis.call('HDEL', leases_key, field)
    else
      redis.call('HSET', leases_key, field, deadline .. '|' .. digits(left))
    end
    state.in_flight = math.max(0, state.in_flight - cost)
    for i, limit in ipairs(limits) do
      if limit.known then
        if settlement.age then
          push(limit, math.ceil(math.max(0, now - settlement.age) / 1000), cost)
        elseif settlement.origins[i] * 1000 + limit.known > now then
          restore(limit, settlement.origins[i], cost)
        end
      end
    end
  end
end

if state.in_flight == 0 then state.oldest = 0 end
if state.in_flight > 0 and now >= state.oldest then
  local oldest, field = 0, nil
  for i, value in ipairs(redis.call('HGETALL', leases_key)) do
    if i % 2 == 1 then
      field = value
    elseif string.sub(field, 1, 2) == 'c:' then
      local deadline, outstanding = string.match(value, '^(%d+)|(%d+)$')
      deadline = tonumber(deadline)
      if deadline <= now then
        redis.call('HDEL', leases_key, field)
        state.in_flight = math.max(0, state.in_flight - tonumber(outstanding))
      elseif oldest == 0 or deadline < oldest then
        oldest = deadline
      end
    end
  end
  state.oldest = oldest
end

if pause > 0 then state.paused = math.max(state.paused, now + pause) end
if vouched > 0 and vouched == state.born then state.warm = math.min(state.warm, now) end

-- Limits as the caller knows them. A new limit or a longer window does not know its past, so nothing starts until
-- whatever may still count has left the window. Uses beyond a lowered limit stay in the log: they still count, and would
-- count again if the limit were raised.
local function adopt()
  local known = redis.call('HGET', meta_key, 'limits')
  if known and known ~= table.concat(names, '|') then
    local listed = {}
    for _, name in ipairs(names) do listed[name] = true end
    for name in string.gmatch(known, '[^|]+') do
      if not listed[name] then redis.call('HDEL', meta_key, 'l:' .. name) end
    end
  end
  for _, limit in ipairs(limits) do
    local past = now + horizon + hold + limit.window
    if not limit.known then
      redis.call('DEL', limit.key)
      limit.known, limit.entries, limit.logged, limit.tail = limit.window, 0, 0, 0
      limit.held, limit.excess = past, 0
    end
    if limit.window > limit.known then limit.held = past end
    limit.known = limit.window
  end
end

-- Looks for `cost` slots of a limit from its cursor on: start and youngest origin, or nil when all are in flight.
local function find(limit, cost)
  local start, origin = math.max(now, limit.held), 0
  if limit.unused > 0 then start = math.max(start, limit.excess) end
  local missing, index, left = math.max(0, cost - limit.unused), limit.index, limit.left
  while missing > 0 do
    if not limit.heads[index] then return nil end
    local ms, count = entry(limit.heads[index])
    missing = missing - (left or count)
    start = math.max(start, ms * 1000 + limit.window)
    origin = math.max(origin, ms)
    index, left = index + 1, nil
  end
  return start, origin
end

local function take(limit, cost)
  local missing = math.max(0, cost - limit.unused)
  limit.unused = math.max(0, limit.unused - cost)
  limit.popped = limit.popped + missing
  while missing > 0 do
    local _, count = entry(limit.heads[limit.index])
    local left = limit.left or count
    local taken = math.min(missing, left)
    missing = missing - taken
    if taken == left then
      limit.index, limit.left = limit.index + 1, nil
    else
      limit.left = left - taken
    end
  end
end

local function grant()
  for _, limit in ipairs(limits) do
    -- Below zero, that many uses must end before one more may begin.
    limit.unused = limit.max - limit.logged - state.in_flight
    limit.index, limit.left, limit.popped = 1, nil, 0
    local needed = wanted - limit.unused
    limit.heads = needed > 0 and redis.call('LRANGE', limit.key, 0, needed - 1) or {}
  end
  local runs, granted, latest = {}, 0, now
  local code, index, wait, exact = NONE, 0, 0, 0
  for _, cost in ipairs(wants) do
    local start, origins, worst, worst_index, all_found = now, {}, nil, 0, 1
    for i, limit in ipairs(limits) do
      local from, origin = find(limit, cost)
      local refuses = from == nil or from > now + horizon
      if from == nil then
        all_found = 0
        from = now + limit.window
        if limit.max >= cost and state.oldest > now then from = math.min(from, state.oldest) end
      end
      origins[i] = origin
      start = math.max(start, from)
      if refuses and (worst == nil or from > worst) then worst, worst_index = from, i - 1 end
    end
    if worst then
      code, index, wait, exact = LIMIT, worst_index, worst - now, all_found
      break
    end
    for _, limit in ipairs(limits) do take(limit, cost) end
    granted = granted + cost
    latest = math.max(latest, start)
    local run = runs[#runs]
    local same = run and run.wait == start - now
    for i = 1, #limits do same = same and run.origins[i] == origins[i] end
    if same then
      run.permits, run.cost = run.permits + 1, run.cost + cost
    else
      runs[#runs + 1] = { permits = 1, cost = cost, wait = start - now, origins = origins }
    end
  end
  local unused = nil
  for _, limit in ipairs(limits) do
    unused = math.min(unused or limit.unused, limit.unused)
    -- Uses beyond a lowered limit leave the log for a start that is booked: a slot never used must not begin before.
    if granted > 0 and limit.logged + state.in_flight > limit.max then limit.excess = math.max(limit.excess, latest) end
    forget_oldest(limit, limit.popped)
  end
  if granted > 0 and jitter < 0 then
    local deadline = latest + hold + longest
    redis.call('HSET', leases_key, 'c:' .. incarnation .. ':' .. digits(number), digits(deadline) .. '|' .. digits(granted))
    state.in_flight = state.in_flight + granted
    state.oldest = state.oldest == 0 and deadline or math.min(state.oldest, deadline)
  elseif granted > 0 then
    for _, run in ipairs(runs) do
      for _, limit in ipairs(limits) do push_many(limit, math.ceil((now + run.wait + jitter) / 1000), run.cost) end
    end
  end
  return answer(code, index, wait, exact, math.max(0, unused), runs)
end

state.version = version
adopt()
local reply
if now < state.warm then
  reply = answer(COLD, 0, state.warm - now, 0, 0, {})
elseif now < state.paused then
  reply = answer(PAUSED, 0, state.paused - now, 0, 0, {})
else
  reply = grant()
end
redis.call('HSET', leases_key, reply_field, cmsgpack.pack({ number, now, reply }))
write_state()
return reply
