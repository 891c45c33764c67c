-- The record of uses that a state has not counted; the fifth part of the limiter's library.
-- Specification: src/domain/quota/coverage.rs.

local SCOPE, ROWS = '<I7I7I7I7I7I7', '<I6I7I7I7'

local function subjects_of(longest, since, last)
  if longest == 0 then since, last = 0, 0 end
  return { longest = longest, within = longest, longer_since = 0, longer_last = 0, since = since, last = last }
end

local function known_born(provider, now)
  local last, longest_of = now + provider.cold - provider.longest, provider.longest_of
  return { subjects_of(longest_of[1], now, last), subjects_of(longest_of[2], now, last),
           budget = provider.budget, hands = 0, joined_since = 0, joined_last = 0, members = provider.members }
end

local function known_of(text)
  local known, at = {}, 1
  for scope = 1, 2 do
    local of = {}
    of.longest, of.within, of.longer_since, of.longer_last, of.since, of.last, at = decode(SCOPE, text, at)
    known[scope] = of
  end
  known.budget, known.hands, known.joined_since, known.joined_last, at = decode(ROWS, text, at)
  known.members = sub(text, at)
  return known
end

local function text_of(known)
  local text = ''
  for scope = 1, 2 do
    local of = known[scope]
    text = text .. encode(SCOPE, of.longest, of.within, of.longer_since, of.longer_last, of.since, of.last)
  end
  return text .. encode(ROWS, known.budget, known.hands, known.joined_since, known.joined_last) .. known.members
end

-- The uses that a counter which counts from `at` has not counted: they were granted before the first instant, and begin
-- to count at the second at the latest.
local function not_before(known, provider, at)
  return max(at, known.hands - provider.horizon - provider.budget), at + provider.horizon + provider.hold
end

local function adopt_subjects(known, longest, now, since, last)
  if longest == 0 or known.longest == 0 then return subjects_of(longest, since, last) end
  if longest > known.longest then
    local waited_for = known.longer_last + known.longest > now
    known.within = waited_for and min(known.within, known.longest) or known.longest
    known.longer_since, known.longer_last = since, last
  end
  known.longest = longest
  return known
end

local function adopt_known(known, provider, now)
  if provider.budget < known.budget then known.hands = max(known.hands, now + provider.horizon + known.budget) end
  known.budget = provider.budget
  local since, last = not_before(known, provider, now)
  for scope = 1, 2 do known[scope] = adopt_subjects(known[scope], provider.longest_of[scope], now, since, last) end
  for at = 1, #provider.members, 8 do
    local member, found = sub(provider.members, at, at + 7), 0
    repeat found = find_text(known.members, member, found + 1, true) until not found or found % 8 == 1
    if not found then
      known.joined_since, known.joined_last = since + provider.noticed, last + provider.noticed
      break
    end
  end
  known.members = provider.members
end

-- The uses that a new counter of a subject has not counted, for a window.
local function not_of_new(known, scope, window)
  local of = known[scope]
  local since, last = max(of.since, known.joined_since), max(of.last, known.joined_last)
  if window > of.within then since, last = max(since, of.longer_since), max(last, of.longer_last) end
  return since, last
end

-- Holds a tally that counted last at `counted`, for the uses that it has not counted. Scope 0 is the provider's.
local function hold_missed(tally, known, scope, counted)
  local since, last = 0, 0
  if counted < known.joined_since then since, last = known.joined_since, known.joined_last end
  local of = known[scope]
  if of and counted < of.since then since, last = max(since, of.since), max(last, of.last) end
  if last == 0 then return end
  for _, cell in ipairs(tally.cells) do hold(cell, since, last) end
end
