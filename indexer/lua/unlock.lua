-- Give up a lock, if it is still ours.
-- KEYS[1] lock
-- ARGV[1] token it was taken with
-- Reply: 1, or 0 if somebody else holds it by now
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
