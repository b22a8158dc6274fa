-- Shared by the reservation scripts. A router's reservations are a HASH with a TTL, gone soon after the router is:
--   t        totals: per replica 24 bytes, its 8-byte name, then u32le requests, u32le prefills, u64le tokens
--   r<id>    a reservation: 8-byte name of the replica, u8 prefilling, u64le uncached tokens, u64le predicted tokens
local RECORD, TOTAL = '<c8I1I8I8', '<I4I4I8'

local function change(key, name, requests, prefills, tokens)
  local totals, at = redis.call('HGET', key, 't') or '', 0
  repeat
    at = string.find(totals, name, at + 1, true)
  until not at or at % 24 == 1
  local r, p, n = 0, 0, 0
  if at then r, p, n = struct.unpack(TOTAL, totals, at + 8) end
  r, p, n = r + requests, p + prefills, n + tokens
  local record = r > 0 and name .. struct.pack(TOTAL, r, p, n) or ''
  if at then
    totals = string.sub(totals, 1, at - 1) .. record .. string.sub(totals, at + 24)
  else
    totals = totals .. record
  end
  redis.call('HSET', key, 't', totals)
end

local function read_reservation(key, id)
  local raw = redis.call('HGET', key, 'r' .. id)
  if not raw then return nil end
  local name, prefilling, tokens, predicted = struct.unpack(RECORD, raw)
  return name, prefilling, tokens, predicted
end
