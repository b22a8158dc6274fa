-- Remove a reservation.
-- KEYS[1] its router's reservations
-- ARGV[1] id
-- Reply: {replica, prefilling, uncached tokens, predicted tokens}, or {} if there is no such reservation
local key, id = KEYS[1], ARGV[1]
local name, prefilling, tokens, predicted = read_reservation(key, id)
if not name then return {} end
redis.call('HDEL', key, 'r' .. id)
change(key, name, -1, -prefilling, -tokens)
return {name, prefilling, tokens, predicted}
