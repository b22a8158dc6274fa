-- Add a reservation.
-- KEYS[1] the router's reservations
-- ARGV[1] id  ARGV[2] replica, 8-byte name  ARGV[3] uncached tokens  ARGV[4] predicted tokens
-- ARGV[5] TTL of the router's word, ms
-- Reply: 1
local key, id, name, tokens = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
redis.call('HSET', key, 'r' .. id, struct.pack(RECORD, name, 1, tokens, tonumber(ARGV[4])))
change(key, name, 1, 1, tokens)
redis.call('PEXPIRE', key, ARGV[5])
return 1
