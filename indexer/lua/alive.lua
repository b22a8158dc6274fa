-- A router's sign of life, or its farewell.
-- KEYS[1] its reservations
-- ARGV[1] TTL of its word, ms; 0: it is leaving
-- Reply: 1
if ARGV[1] == '0' then
  redis.call('DEL', KEYS[1])
else
  redis.call('HSET', KEYS[1], 'alive', 1)
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 1
