-- The ZSET of zset_article.lua made correct: unique members, the clock of Redis, n permits per call or none, the wait.
-- Its slots are free a window after the grant. It releases no permit, and a lost reply loses its permits.
--
-- KEYS  1 log: zset of (unique member, instant in µs)
-- ARGV  1 most calls per window    2 window in µs    3 n    4 name of this call, unlike any other's
-- REPLY array: granted (n or 0), left, wait in µs until n may be had (0: granted, -1: never)

local most, window, n = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - window)
local used = redis.call('ZCARD', KEYS[1])
if used + n > most then
  local last = used + n - most - 1
  local deciding = redis.call('ZRANGE', KEYS[1], last, last, 'WITHSCORES')
  return { 0, most - used, deciding[2] and deciding[2] + window - now or -1 }
end
local members = {}
for i = 1, n do
  members[2 * i - 1] = now
  members[2 * i] = ARGV[4] .. ':' .. i
end
redis.call('ZADD', KEYS[1], unpack(members))
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000))
return { n, most - used - n, 0 }
