-- Nothing: what calling any script costs.
--
-- KEYS  none
-- ARGV  none
-- REPLY integer 1

return 1
