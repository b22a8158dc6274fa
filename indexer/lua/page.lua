-- Shared by the page scripts. A page is a HASH:
--   d        table of holders, u32le each: incarnation * 4 + tier, from 0; a slot is a position in it, from 0. Tier 3
--            is no tier but THROUGH (proto/index.py), set besides one
--   v        per slot, u32le version and u32le count of bits set; a slot with count 0 is free for another holder,
--            but until one takes it, it remembers the newest version its last holder wrote here
--   o        present once the page refused a block (overflow); dropped when the page empties
--   <8 bytes>  a block key: bitmap over the slots, slot s at byte s / 8, bit s % 8, without trailing zero bytes
local function find_slot(holders, holder)
  local name, at = struct.pack('<I4', holder), 0
  repeat
    at = string.find(holders, name, at + 1, true)
  until not at or at % 4 == 1
  return at and (at - 1) / 4
end

local function splice(text, at, part)
  return string.sub(text, 1, at - 1) .. part .. string.sub(text, at + #part)
end

local function set_state(states, slot, version, count)
  return splice(states, slot * 8 + 1, struct.pack('<I4I4', version, count))
end

-- The bitmap with one slot's bit set or cleared, and the change in the number of bits: -1, 0 or 1.
local function with_bit(bitmap, slot, want)
  local at, bit_value = math.floor(slot / 8) + 1, 2 ^ (slot % 8)
  local byte = string.byte(bitmap, at) or 0
  local has = math.floor(byte / bit_value) % 2 == 1
  if has == want then return bitmap, 0 end
  if want then
    if at > #bitmap then bitmap = bitmap .. string.rep('\0', at - #bitmap) end
    return splice(bitmap, at, string.char(byte + bit_value)), 1
  end
  local cleared = splice(bitmap, at, string.char(byte - bit_value))
  return (string.gsub(cleared, '%z+$', '')), -1
end
