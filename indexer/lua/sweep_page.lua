-- Clear everything a dead incarnation holds in one page, and fence off what it may still write here.
-- KEYS[1] page
-- ARGV[1] incarnation
-- Reply: blocks left in the page
local page, base = KEYS[1], tonumber(ARGV[1]) * 4
local found = redis.call('HMGET', page, 'd', 'v', 'o')
local holders, states = found[1], found[2]
if not holders then return 0 end
local blocks = redis.call('HLEN', page) - (found[3] and 3 or 2)

local slots, held = {}, 0
for tier = 1, 4 do
  slots[tier] = find_slot(holders, base + tier - 1)
  if slots[tier] then
    local _, count = struct.unpack('<I4I4', states, slots[tier] * 8 + 1)
    held = held + count
    states = set_state(states, slots[tier], 4294967295, 0)
  end
end

if held > 0 then
  -- Bounded: a page takes no more blocks than its overflow limit.
  local all, set, gone = redis.call('HGETALL', page), {}, {}
  for i = 1, #all, 2 do
    local key, bitmap = all[i], all[i + 1]
    if #key == 8 then
      local out = bitmap
      for tier = 1, 4 do
        if slots[tier] then out = with_bit(out, slots[tier], false) end
      end
      if out == '' then
        gone[#gone + 1] = key
      elseif out ~= bitmap then
        set[#set + 1], set[#set + 2] = key, out
      end
    end
  end
  blocks = blocks - #gone
  if blocks > 0 then
    if #gone > 0 then redis.call('HDEL', page, unpack(gone)) end
    if #set > 0 then redis.call('HSET', page, unpack(set)) end
  end
end
if blocks == 0 then
  redis.call('UNLINK', page)
else
  redis.call('HSET', page, 'v', states)
end
return blocks
