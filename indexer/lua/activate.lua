-- Move a replica's pointer to the newest claim, if this owner still holds it.
-- KEYS[1] registry
-- ARGV[1] ref  ARGV[2] owner  ARGV[3] incarnation
-- Reply: 1, or 0 when superseded
local registry, ref, incarnation = KEYS[1], ARGV[1], tonumber(ARGV[3])
local r = read_record(registry, ref)
if not r or r.tombstoned > 0 or r.owner ~= ARGV[2] or r.newest ~= incarnation then return 0 end
if r.pointer ~= incarnation then
  local now = now_ms()
  bury(registry, r.pointer, now)
  r.pointer = incarnation
  save_record(registry, ref, r)
  changed(registry, now)
end
return 1
