-- A reserved request's prefill is done: its tokens no longer count.
-- KEYS[1] its router's reservations
-- ARGV[1] id
-- Reply: {replica, prefilling before, uncached tokens, predicted tokens}, or {} if there is no such reservation
local key, id = KEYS[1], ARGV[1]
local name, prefilling, tokens, predicted = read_reservation(key, id)
if not name then return {} end
if prefilling == 1 then
  redis.call('HSET', key, 'r' .. id, struct.pack(RECORD, name, 0, 0, predicted))
  change(key, name, 0, -1, -tokens)
end
return {name, prefilling, tokens, predicted}
