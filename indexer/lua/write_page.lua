-- Set the absolute state of some blocks of one page for one incarnation.
-- KEYS[1] page
-- ARGV[1] incarnation  ARGV[2] version  ARGV[3] most blocks a page takes  ARGV[4] TTL, ms  ARGV[5] TTL once empty, ms
-- ARGV[6] (block key, 8 bytes; tier mask, 1 byte) per block, each key once, at most 256
-- Reply: {bits the incarnation now has in the page, keys refused for overflow}, or {-1, ''}: version too old
local page, entries = KEYS[1], ARGV[6]
local base, version, limit = tonumber(ARGV[1]) * 4, tonumber(ARGV[2]), tonumber(ARGV[3])
local head = string.sub(page, -8)

local fields = {'d', 'v', 'o'}
for at = 1, #entries, 9 do fields[#fields + 1] = string.sub(entries, at, at + 7) end
local found = redis.call('HMGET', page, unpack(fields))
local holders, states, marked = found[1] or '', found[2] or '', found[3]

local slots, counts = {}, {0, 0, 0, 0}
for tier = 1, 4 do
  local slot = find_slot(holders, base + tier - 1)
  if slot then
    local newest, count = struct.unpack('<I4I4', states, slot * 8 + 1)
    if newest > version then return {-1, ''} end
    slots[tier], counts[tier] = slot, count
  end
end

local function take_slot(tier)
  local at = 0
  repeat
    at = string.find(states, '\0\0\0\0', at + 1, true)
    local slot = at and (at - 5) / 8
  until not at or (at % 8 == 5 and slot ~= slots[1] and slot ~= slots[2] and slot ~= slots[3]
      and slot ~= slots[4])
  local slot = at and (at - 5) / 8 or #holders / 4
  holders = splice(holders, slot * 4 + 1, struct.pack('<I4', base + tier - 1))
  states = set_state(states, slot, version, 0)
  slots[tier] = slot
end

-- Most blocks of a page share their bitmap, so the work is done once per (tier mask, bitmap).
local done = {}
local function apply(bitmap, tiers)
  local of_tiers = done[tiers]
  if not of_tiers then of_tiers = {}; done[tiers] = of_tiers end
  local result = of_tiers[bitmap]
  if result then return result end
  local out, change = bitmap, {0, 0, 0, 0}
  for tier = 1, 4 do
    local want = math.floor(tiers / 2 ^ (tier - 1)) % 2 == 1
    if want and not slots[tier] then take_slot(tier) end
    if slots[tier] then out, change[tier] = with_bit(out, slots[tier], want) end
  end
  result = {out, change}
  of_tiers[bitmap] = result
  return result
end

local blocks = 0
if found[1] then blocks = redis.call('HLEN', page) - (marked and 3 or 2) end
local set, gone, refused, grows = {}, {}, {}, false
for i = 4, #fields do
  local key, tiers, bitmap = fields[i], string.byte(entries, (i - 3) * 9), found[i]
  grows = grows or tiers > 0
  if bitmap or tiers > 0 then
    if not bitmap and (marked or blocks >= limit) and key ~= head then
      refused[#refused + 1] = key
      if not marked then
        marked = '1'
        set[#set + 1], set[#set + 2] = 'o', marked
      end
    else
      local result = apply(bitmap or '', tiers)
      local out, change = result[1], result[2]
      if not bitmap then blocks = blocks + 1 end
      for tier = 1, 4 do counts[tier] = counts[tier] + change[tier] end
      if out == '' then
        gone[#gone + 1] = key
        blocks = blocks - 1
      elseif out ~= bitmap then
        set[#set + 1], set[#set + 2] = key, out
      end
    end
  end
end
-- Even a removal of nothing leaves its version behind, so that an older command still on its way loses.
if not (slots[1] or slots[2] or slots[3] or slots[4]) then take_slot(1) end
for tier = 1, 4 do
  if slots[tier] then states = set_state(states, slots[tier], version, counts[tier]) end
end
if holders ~= found[1] then set[#set + 1], set[#set + 2] = 'd', holders end
set[#set + 1], set[#set + 2] = 'v', states

local ttl = blocks > 0 and ARGV[4] or ARGV[5]
-- Out of memory refuses a script's first write only if that may grow; this one never does, so removals go through.
if not grows then redis.call('PEXPIRE', page, ttl) end
redis.call('HSET', page, unpack(set))
if blocks == 0 and marked then gone[#gone + 1] = 'o' end
if #gone > 0 then redis.call('HDEL', page, unpack(gone)) end
redis.call('PEXPIRE', page, ttl)
return {counts[1] + counts[2] + counts[3] + counts[4], table.concat(refused)}
