-- Who may have reservations.
-- KEYS[1] routers
-- ARGV[1] a router to add, or ''  ARGV[2...] routers to drop
-- Reply: their names
if ARGV[1] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], 1) end
for i = 2, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
return redis.call('HKEYS', KEYS[1])
