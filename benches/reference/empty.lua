-- An empty script: the cost of calling any script.
--
-- KEYS  none
-- ARGV  none
-- REPLY integer 1

return 1
