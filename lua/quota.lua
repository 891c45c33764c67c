-- One call to the limiter of one quota: it acquires permits under all limits or none, and releases earlier ones; the
-- sixth part of the limiter's library, which src/limiter/redis/library.rs puts together and registers.
-- Specification: src/domain/quota/mod.rs, the same decisions in the same order; tests/contract/limiter/differential.rs
-- compares the two on random histories. tests/docs/lua.rs holds these headers to the code.
--
-- KEYS  all under the hash tag {quota}; what each holds: tallies.lua
--   prefix:{quota}               the state: a hash
--   prefix:{quota}:log:CELL      for each of the provider's cells in their order: a list of chunks of its log
--   prefix:{quota}:SUBJECT       for each subject of the call: a hash
--
-- ARGV  one argument: unsigned, little-endian, each field with its bytes; instants and durations in µs. One after another:
--   head        run id digest 8, terms digest 8, incarnation 8, number 6, bytes of terms 2, wants 2, releases 2,
--               of them unused 2, subjects 2, booked ahead at most 4, more 1
--   terms       version 6, grant jitter 6, longest hold 6, booking horizon 6, send budget 6, longest window 6, cold after a
--               loss 6, until all have noticed 6, resumed at 6, longest of accounts 6, longest of references 6, members 2,
--               cells 2, bytes of names 2; a digest 8 for each member; names of the provider's cells joined by "|"; so many
--               cells. Longest windows; 0: no limit counts them
--   cell        kind 1, applies 1, mode 1, window 7, offset or interval 7, granule in ms 4, max 4, index in the spec 2
--   more        pause 6, distrusted born 7, rebuilt born 7, past uses 2, open charges 4, open lookups 4, seeded born 7, seeds 2,
--               bytes of seeds 4; only if the head says so, 0 is none
--   want        permits 4, cost 2, kind 1, subjects 1, first subject 2, second subject 2; subjects count from 1
--   release     call 6, cost 4, kind 1, release kind 1, subjects 1, first subject 2, second subject 2, age 6
--   origin      instant in ms 6; behind an unused release, one for each of the provider's cells
--   past use    age 6, cost of charges 4, of lookups 4; oldest first
--   seed        subject 2, as of 7, within 7, open charges 4, open lookups 4, past uses 2; so many past uses; of subject 0 it
--               is for the provider's cells
--   subject     limits digest 8, scope 1, bytes of names 2, cells 2; names and cells as in the terms, whose longest hold the
--               digest has too, and the longest window of the scope
--
-- CODES  kind of a cell: 0 log, 1 window, 2 bucket, 3 slots
--   mode: 0 counts the start, 1 held until the answer, 2 shadow, 3 pacing
--   applies and kind of a want: 0 all, 1 charge, 2 lookup
--   scope: 1 account, 2 reference
--   release kind: 0 used, 1 unused
--   refusal: 0 none, 1 limit, 2 cold, 3 paused, 4 stale version, 5 stale call, 6 needs history
--   readable: 0 if the limit knows its past, else in how long the ledger does, and one µs more
--   calls: of the state so far, this one among them; if they are no more than in an earlier reply, the state was put back
--   run id digest: of the run id and the number of this layout, which src/limiter/redis/encode.rs has
--   previous call: number of the caller's call before this one, 0 if the state has none; if it is not the caller's last one
--   that was counted (not stale), the state was put back
--
-- REPLY  packed in the same way
--   reply       refusal 1, exact 1, index of the limit 2, wait 6, now 7, newest version 6, born 7, calls 6, previous
--               call 6, remaining 4, deciding limit 2, reset 6, readable 4, runs 4, passed over 2
--   run         want 2, permits 4, wait 6; origins as above; wants count from 0
--   passed over want 2, limit 2, wait 6, exact 1, readable 4
--
-- EXAMPLE  100/1s, one charge wanted of a warm state that was never used
--   cell (0, 0, 1, 1002500, 0, 1, 100, 0), want (1, 1, 1, 0, 0, 0)
--   → refusal 0, remaining 99, reset 1002500, run (0, 1, 0), origin (0)
--
-- ERRORS  ARGUMENT: the argument is malformed, nothing was written. DAMAGED: the stored state cannot be read, or a part of
--   it is lost; all of it was deleted.
--   A write that fails half-way may lose slots and never creates any: chunks leave a list before their cell says so,
--   and enter it after. A missing chunk ends the state.

local NONE, LIMIT, COLD, PAUSED, STALE_VERSION, STALE_CALL, NEEDS_HISTORY = 0, 1, 2, 3, 4, 5, 6
local REPLY_KEPT_US = 600000000
local SUBJECT_KEPT_US = 1000000
local TALLIES_MOST = 256
local HEADER, HEADER_BYTES = '<c8c8c8I6I2I2I2I2I2I4I1', 45
local TERMS, TERMS_BYTES = '<I6I6I6I6I6I6I6I6I6I6I6I2I2I2', 72
local MORE, MORE_BYTES = '<I6I7I7I2I4I4I7I2I4', 43
local SEED, SEED_BYTES = '<I2I7I7I4I4I2', 26
local PAST_BYTES = 14
local HEAD, HEAD_BYTES = '<c8c8I7I7I7I6I7I6I6', 62
local SUBJECT_HEAD, SUBJECT_HEAD_BYTES = '<c8I7I7I7', 29
local ANSWER = '<I1I1I2I6I7I6I7I6I6I4I2I6I4I4I2'
local EMPTY = {}
-- Field of the permits in flight of a lost state. It belongs to no caller, so they are never released.
local LOST = '\0\0\0\0\0\0\0\0'

-- Tallies by the digest of their limits, so that limits need not be decoded each time. Each call fills in the state.
local tallies_known, tallies_count = {}, 0

local function provider_tally(digest, text, bytes)
  if #text < HEADER_BYTES + bytes or bytes < TERMS_BYTES then return nil end
  local version, jitter, lasts, horizon, budget, longest, cold, noticed, resumed, accounts, references, members, cells, names, at =
    decode(TERMS, text, HEADER_BYTES + 1)
  if cells == 0 or TERMS_BYTES + members * 8 + names + cells * RECORD ~= bytes then return nil end
  local names_at = at + members * 8
  local tally = tally_of(sub(text, names_at, names_at + names - 1), text, names_at + names, cells)
  tally.version, tally.jitter, tally.hold, tally.horizon, tally.budget, tally.longest, tally.cold =
    version, jitter, lasts, horizon, budget, longest, cold
  tally.noticed, tally.resumed, tally.members = noticed, resumed, sub(text, at, names_at - 1)
  tally.longest_of = { accounts, references }
  if tallies_count >= TALLIES_MOST then tallies_known, tallies_count = {}, 0 end
  tallies_known[digest], tallies_count = tally, tallies_count + 1
  return tally
end

-- The subjects of a call and their positions; nil if the argument has another length than its head says.
local function subjects_in(text, at, count)
  local found = {}
  for i = 1, count do
    if #text < at + 12 then return nil end
    local digest, scope, names, cells, names_at = decode('<c8I1I2I2', text, at)
    at = names_at + names + cells * RECORD
    if names == 0 or cells == 0 or scope < 1 or scope > 2 or #text < at - 1 then return nil end
    found[i] = { digest = digest, scope = scope, names = sub(text, names_at, names_at + names - 1), at = names_at + names, cells = cells }
  end
  if #text ~= at - 1 then return nil end
  return found
end

-- The ledger's history of subjects and of the provider's cells; nil if it is malformed.
local function seeds_in(text, at, count, bytes, subjects_n)
  local found, uses, ends = {}, 0, at + bytes
  for i = 1, count do
    if ends < at + SEED_BYTES then return nil end
    local past = {}
    local charges, lookups
    past.place, past.as_of, past.within, charges, lookups, past.uses, at = decode(SEED, text, at)
    past.open, past.at = { charges, lookups }, at
    at, uses = at + past.uses * PAST_BYTES, uses + past.uses
    if past.place > subjects_n or at > ends or uses > MOST then return nil end
    found[i] = past
  end
  if at ~= ends then return nil end
  return found
end

-- Fills a tally from its hash, behind the head: directly under the same limits, otherwise limit by limit.
local function fill(tally, m, at, same, now, since, last)
  tally.refreshed, tally[1], tally[2], tally.oldest, at = decode(TALLY, m, at)
  tally.adopted = not same
  if same then return load_cells(tally, m, at) end
  local s = redis.call('HGET', tally.key, 's')
  local names, cells, names_at = decode('<I2I2', s)
  local old = tally_of(sub(s, names_at, names_at + names - 1), s, names_at + names, cells)
  load_cells(old, m, at)
  adopt_all(tally, old, now, since, last)
end

local function begin(tally)
  for _, cell in ipairs(tally.cells) do reset(cell, 0, 0) end
  tally[1], tally[2], tally.oldest, tally.refreshed, tally.adopted = 0, 0, 0, 0, true
end

local function refuse(code, wait, now, version, born, calls, previous)
  return encode(ANSWER, code, 0, 0, wait, now, version, born, calls, previous, 0, 0, 0, 0, 0, 0)
end

local function hold_lost(provider, deadline, charges, lookups)
  local own = encode('<I6I7I4', 0, 0, 0) .. encode('<I6I7I4I4', 1, deadline, charges, lookups)
  redis.call('HSET', provider.key, LOST, own)
  provider[1], provider[2] = provider[1] + charges, provider[2] + lookups
  if provider.oldest == 0 or deadline < provider.oldest then provider.oldest = deadline end
end

-- The tally of a subject, with the caller's limits. A hash whose uses are all over counts as expired. A hash of an
-- older state does not cover what this state has lost.
local function subject_tally(key, subject, text, mine, now, born, known, provider)
  local tally = tally_of(subject.names, text, subject.at, subject.cells)
  local there = redis.call('HMGET', key, 'm', mine)
  local state = there[1]
  local limits, touched, of_born, kept_until = nil, 0, nil, 0
  if state then
    limits, touched, of_born, kept_until = decode(SUBJECT_HEAD, state)
  end
  tally.key, tally.digest = key, subject.digest
  tally.kept_until, tally.had_own = 0, there[2]
  if of_born == born and kept_until > now then
    tally.kept_until = kept_until
    tally.known, tally.leases = true, there[2] and leases_in(there[2]) or ''
    -- Every use that a new limit has not counted was granted before the tally counted last.
    local since, latest = not_before(known, provider, touched)
    fill(tally, state, SUBJECT_HEAD_BYTES + 1, limits == subject.digest, now, since, latest)
    hold_missed(tally, known, subject.scope, touched)
  else
    if state then redis.call('DEL', key) end
    begin(tally)
    for _, cell in ipairs(tally.cells) do hold(cell, not_of_new(known, subject.scope, cell.window)) end
  end
  return tally
end

local function decide(keys, args)
  local text = args[1]
  if #args ~= 1 or #text < HEADER_BYTES then return redis.error_reply('ARGUMENT not as announced: its length') end
  local run, digest, mine, number, terms_n, wants_n, releases_n, unused_n, subjects_n, ahead, more = decode(HEADER, text)
  local provider = tallies_known[digest] or provider_tally(digest, text, terms_n)
  if not provider then return redis.error_reply('ARGUMENT not as announced: the terms') end
  local version, horizon, longest, cells_n = provider.version, provider.horizon, provider.longest, #provider.cells
  local before = horizon + provider.hold
  provider.known_text = nil
  -- Padded like a window, because the provider has another clock.
  local lasts = provider.hold + 2000 + ceil(provider.hold / 2000)
  local wants_at = HEADER_BYTES + terms_n + 1
  local pause, distrusted, rebuilt, past_n, open_charges, open_lookups, seeded, seeds_n, seeds_bytes = 0, 0, 0, 0, 0, 0, 0, 0, 0
  if more > 0 then
    if #text < wants_at + MORE_BYTES - 1 then return redis.error_reply('ARGUMENT not as announced: its length') end
    pause, distrusted, rebuilt, past_n, open_charges, open_lookups, seeded, seeds_n, seeds_bytes, wants_at =
      decode(MORE, text, wants_at)
  end
  local releases_at = wants_at + wants_n * 12
  local past_at = releases_at + releases_n * 23 + unused_n * cells_n * 6
  local seeds_at = past_at + past_n * PAST_BYTES
  local subjects_at = seeds_at + seeds_bytes
  local subjects, seeds = EMPTY, EMPTY
  if seeds_n > 0 or seeds_bytes > 0 then
    seeds = #text >= subjects_at - 1 and seeds_in(text, seeds_at, seeds_n, seeds_bytes, subjects_n)
  end
  if subjects_n > 0 then subjects = subjects_in(text, subjects_at, subjects_n) end
  if not subjects or not seeds or (subjects_n == 0 and #text ~= subjects_at - 1) or #keys ~= 1 + cells_n + subjects_n or number == 0
      or wants_n > MOST or releases_n > MOST or past_n > MOST then
    return redis.error_reply('ARGUMENT not as announced')
  end

  local state_key = keys[1]
  local clock = clock_us()
  local kept = redis.call('HMGET', state_key, 'm', mine, 'k')
  local m, own, known_text = kept[1], kept[2], kept[3]

  -- The state as stored, or a new one if it is missing, of another server, or invalidated by the caller.
  local known_run, known_digest, born, warm, last, known_version, paused, resumed, calls, known
  provider.key = state_key
  if m then
    known_run, known_digest, born, warm, last, known_version, paused, resumed, calls = decode(HEAD, m)
    if known_run ~= run or born == distrusted then m = nil end
  end
  if not m then
    own = nil
    born, warm, last, known_version, paused, calls = clock, clock + provider.cold, clock, version, 0, 0
  end
  local now = max(clock, last)

  -- A call that was seen before is answered as before; one that was overtaken gets nothing.
  local leases, previous, _, bytes = '', 0, 0, 0
  if own then
    previous, _, bytes = decode('<I6I7I4', own)
    if previous == number then return sub(own, 18, 17 + bytes) end
    if previous > number then return refuse(STALE_CALL, 0, now, known_version, born, calls, previous) end
    leases = sub(own, 18 + bytes)
  end
  -- Older settings may not know every limit that counts a release, so such a call changes nothing.
  if version < known_version then return refuse(STALE_VERSION, 0, now, known_version, born, calls, previous) end
  if not own then
    local fields = m and redis.call('HGETALL', state_key) or EMPTY
    for i = 1, #fields, 2 do
      if #fields[i] == 8 then
        local _, at = decode('<I6I7', fields[i + 1])
        if at + REPLY_KEPT_US <= now and leases_in(fields[i + 1]) == '' then redis.call('HDEL', state_key, fields[i]) end
      end
    end
  end
  -- An operator has lifted the wait that the provider had named.
  if m and resumed ~= provider.resumed then paused = 0 end
  if m then
    known = known_of(known_text)
    if known_digest ~= digest then adopt_known(known, provider, now) end
  else
    known = known_born(provider, now)
  end

  -- The provider's tally, with the caller's limits.
  provider.leases = leases
  for i = 1, cells_n do provider.cells[i].key = keys[1 + i] end
  if m then
    local since, latest = not_before(known, provider, now)
    fill(provider, m, HEAD_BYTES + 1, known_digest == digest, now, since, latest)
  else
    redis.call('DEL', state_key)
    begin(provider)
  end
  if provider.adopted then provider.known_text = text_of(known) end
  hold_missed(provider, known, 0, last)
  last, known_version = now, version

  local tallies = EMPTY
  if subjects_n > 0 then tallies = {} end
  for i = 1, subjects_n do
    tallies[i] = subject_tally(keys[1 + cells_n + i], subjects[i], text, mine, now, born, known, provider)
  end

  local at = releases_at
  for _ = 1, releases_n do
    local call, cost, kind, release_kind, owns, first, second, age
    call, cost, kind, release_kind, owns, first, second, age, at = decode('<I6I4I1I1I1I2I2I6', text, at)
    local used_age = release_kind == 0 and age
    release(provider, now, call, cost, kind, used_age, text, at)
    if owns > 0 then release(tallies[first], now, call, cost, kind, used_age, text, nil) end
    if owns > 1 then release(tallies[second], now, call, cost, kind, used_age, text, nil) end
    if release_kind == 1 then at = at + 6 * cells_n end
  end
  expire(provider, now, mine)
  for i = 1, subjects_n do expire(tallies[i], now, mine) end

  if pause > 0 then paused = max(paused, now + pause) end
  if rebuilt == born and now < warm then
    warm = now
    local past = { uses = past_n, at = past_at, open = { open_charges, open_lookups } }
    if past_n == 0 and open_charges + open_lookups == 0 then
      for scope = 1, 2 do
        if known[scope].since <= born then known[scope].since, known[scope].last = 0, 0 end
      end
      provider.known_text = text_of(known)
    end
    for _, cell in ipairs(provider.cells) do recall_all(cell, now, text, past) end
    if open_charges + open_lookups > 0 and provider.held then
      hold_lost(provider, now + horizon + lasts, open_charges, open_lookups)
    end
  end
  if seeded == born then
    for _, past in ipairs(seeds) do
      local tally = past.place == 0 and provider or tallies[past.place]
      for _, cell in ipairs(tally.cells) do
        if seed(cell, now, text, past, now + horizon + lasts) then tally.known = true end
      end
    end
  end

  local reply
  calls = calls + 1
  if now < warm then
    reply = refuse(COLD, warm - now, now, version, born, calls, previous)
  elseif now < paused then
    reply = refuse(PAUSED, paused - now, now, version, born, calls, previous)
  else
    open_cells(provider, now, provider.jitter, horizon)
    for i = 1, subjects_n do open_cells(tallies[i], now, provider.jitter, horizon) end
    local index, wait, exact, readable_in, runs_n, runs, passed_n, passed =
      serve(provider, tallies, text, wants_at, wants_n, now, min(ahead, horizon))
    close(provider, number, lasts, provider.jitter)
    for i = 1, subjects_n do close(tallies[i], number, lasts, provider.jitter) end
    local remaining, decides, reset = verdict(provider, now, index)
    local refusal = not index and NONE or readable_in > 0 and NEEDS_HISTORY or LIMIT
    reply = encode(ANSWER, refusal, exact, index or 0, wait, now, version, born, calls, previous, remaining, decides, reset,
      readable_in, runs_n, passed_n) .. runs .. passed
  end
  save(provider, encode(HEAD, run, digest, born, warm, last, version, paused, provider.resumed, calls), now, mine,
    encode('<I6I7I4', number, now, #reply) .. reply .. provider.leases, longest + before, STATE_SPARE_US)
  for i = 1, subjects_n do
    local tally = tallies[i]
    if tally.known or tally.granted[1] + tally.granted[2] > 0 then
      local until_us = max(tally.kept_until, now + before + known[subjects[i].scope].longest + SUBJECT_KEPT_US)
      local own = tally.leases ~= '' and encode('<I6I7I4', 0, 0, 0) .. tally.leases or nil
      save(tally, encode(SUBJECT_HEAD, tally.digest, now, born, until_us), now, mine, own, until_us - now)
    end
  end
  return reply
end

-- The text of an error that `pcall` caught; some versions of Redis raise a table.
local function problem_in(caught)
  return type(caught) == 'table' and caught.err or caught
end

-- Whether an error is one of Redis itself, which begins with a code and is no fault of the stored state. A key of
-- another type is a fault of the state.
local function is_of_redis(problem)
  return find_text(problem, '^%u+ ') and not find_text(problem, 'WRONGTYPE', 1, true)
end

-- The function of the library. A state that cannot be read is lost: it is deleted, so that no later call meets it. An
-- error of Redis itself is no fault of the state, except for a key of another type.
local function quota(keys, args)
  if not decode then bind() end
  local went, reply = pcall(decide, keys, args)
  if went then return reply end
  local problem = problem_in(reply)
  if is_of_redis(problem) then return redis.error_reply(problem) end
  for i = 1, #keys do redis.call('DEL', keys[i]) end
  return redis.error_reply('DAMAGED the stored state cannot be read (' .. problem .. '); it is reset')
end
