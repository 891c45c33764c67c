-- A sliding log in a ZSET in the form that tutorials print: one member per timestamp, the caller's clock.
-- It undercounts: calls of the same millisecond are one member, and clocks of callers differ.
--
-- KEYS  1 log: zset; member and score are the call's instant
-- ARGV  1 now in ms, by the caller's clock    2 window in ms    3 most calls per window
-- REPLY 1 allowed, 0 refused

redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, ARGV[1] - ARGV[2])
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[3]) then
  redis.call('ZADD', KEYS[1], ARGV[1], ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
return 0
