-- Looks at a carousel without taking, settling or writing anything.
--
-- KEYS  as in sliding_log.lua: meta, leases, one log per limit
-- ARGV  k × padded window in µs, in the order of the logs
-- REPLY k integers: uses within each window, and permits in flight
-- EXAMPLE  100/1s with 3 answered and 2 in flight: ARGV 1002500 → 5

local BASE_MS = 1700000000000
local COUNT = 4096

local time = redis.call('TIME')
local meta = redis.call('HMGET', KEYS[1], 'last', 'in_flight')
local now = math.max(time[1] * 1000000 + time[2], tonumber(meta[1] or '0'))
local reply = {}
for i = 3, #KEYS do
  local used = tonumber(meta[2] or '0')
  local window = tonumber(ARGV[i - 2])
  if not window then return redis.error_reply('ARGUMENT window ' .. (i - 2) .. ' is missing') end
  for _, value in ipairs(redis.call('LRANGE', KEYS[i], 0, -1)) do
    local n = tonumber(value)
    local count = n % COUNT
    if ((n - count) / COUNT + BASE_MS) * 1000 + window > now then used = used + count end
  end
  reply[i - 2] = used
end
return reply
