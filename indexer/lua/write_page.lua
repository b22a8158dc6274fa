-- Set the absolute state of some blocks of one page for one incarnation.
-- KEYS[1] page
-- ARGV[1] incarnation  ARGV[2] version  ARGV[3] most blocks a page takes  ARGV[4] TTL, ms  ARGV[5] TTL once empty, ms
-- ARGV[6] (block key, 8 bytes; tier mask, 1 byte) per block, each key once, at most 256
-- Reply: {bits the incarnation now has in the page, keys refused for overflow}, or {-1, ''}: version too old
local page, entries = KEYS[1], ARGV[6]
local base, version, limit = tonumber(ARGV[1]) * 4, tonumber(ARGV[2]), tonumber(ARGV[3])
local call, sub, byte, unpack, floor = redis.call, string.sub, string.byte, unpack, math.floor
local head, last = sub(page, -8), #entries / 9 + 3

-- Fields of a page that is there, keys of the blocks from 4 on. Most calls write a new page: then nothing is read.
local blocks = call('HLEN', page)
local fields, found = {'d', 'v', 'o'}, {}
for i = 4, last do fields[i] = sub(entries, i * 9 - 35, i * 9 - 28) end
if blocks > 0 then found = call('HMGET', page, unpack(fields)) end
local holders, states, marked = found[1] or '', found[2] or '', found[3]
if blocks > 0 then blocks = blocks - (marked and 3 or 2) end

local slots, counts = {}, {0, 0, 0, 0}
if found[1] then
  for tier = 1, 4 do
    local slot = find_slot(holders, base + tier - 1)
    if slot then
      local newest, count = struct.unpack('<I4I4', states, slot * 8 + 1)
      if newest > version then return {-1, ''} end
      slots[tier], counts[tier] = slot, count
    end
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

-- Neighbours mostly share their bitmap and their tiers, so the work is done once per run of them.
local was, mask, out, run, change = nil, nil, nil, 0, {0, 0, 0, 0}
local function count_run()
  if run > 0 then
    for tier = 1, 4 do counts[tier] = counts[tier] + run * change[tier] end
  end
end
local function begin_run(bitmap, tiers)
  count_run()
  was, mask, out, run = bitmap, tiers, bitmap or '', 0
  for tier = 1, 4 do
    local want = floor(tiers / 2 ^ (tier - 1)) % 2 == 1
    if want and not slots[tier] then take_slot(tier) end
    change[tier] = 0
    if slots[tier] then out, change[tier] = with_bit(out, slots[tier], want) end
  end
end

local set, gone, refused, grows = {}, {}, {}, false
local sets, goes = 0, 0
for i = 4, last do
  local bitmap, tiers = found[i], byte(entries, i * 9 - 27)
  if tiers > 0 then grows = true end
  if bitmap or tiers > 0 then
    if not bitmap and (marked or blocks >= limit) and fields[i] ~= head then
      refused[#refused + 1] = fields[i]
      if not marked then
        marked = '1'
        set[sets + 1], set[sets + 2], sets = 'o', marked, sets + 2
      end
    else
      if bitmap ~= was or tiers ~= mask then begin_run(bitmap, tiers) end
      run = run + 1
      if not bitmap then blocks = blocks + 1 end
      if out == '' then
        goes, blocks = goes + 1, blocks - 1
        gone[goes] = fields[i]
      elseif out ~= bitmap then
        set[sets + 1], set[sets + 2], sets = fields[i], out, sets + 2
      end
    end
  end
end
count_run()
-- Even a removal of nothing leaves its version behind, so that an older command still on its way loses.
if not (slots[1] or slots[2] or slots[3] or slots[4]) then take_slot(1) end
for tier = 1, 4 do
  if slots[tier] then states = set_state(states, slots[tier], version, counts[tier]) end
end
if holders ~= found[1] then set[sets + 1], set[sets + 2], sets = 'd', holders, sets + 2 end
set[sets + 1], set[sets + 2] = 'v', states

local ttl = blocks > 0 and ARGV[4] or ARGV[5]
-- Out of memory refuses a script's first write only if that may grow; this one never does, so removals go through.
if not grows then call('PEXPIRE', page, ttl) end
call('HSET', page, unpack(set))
if blocks == 0 and marked then goes = goes + 1; gone[goes] = 'o' end
if goes > 0 then call('HDEL', page, unpack(gone)) end
if grows or not found[1] then call('PEXPIRE', page, ttl) end
return {counts[1] + counts[2] + counts[3] + counts[4], table.concat(refused)}
