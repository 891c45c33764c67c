-- Reads the clock and nothing else.
--
-- KEYS  none
-- ARGV  none
-- REPLY text, seconds since the Unix epoch

return redis.call('TIME')[1]
