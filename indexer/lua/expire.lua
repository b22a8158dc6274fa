-- Tombstone a replica whose lease ended more than the grace ago; remove one that was tombstoned that long ago.
-- KEYS[1] registry
-- ARGV[1] ref  ARGV[2] grace, ms
-- Reply: 1 if it did either
local registry, ref, grace = KEYS[1], ARGV[1], tonumber(ARGV[2])
local r, now = read_record(registry, ref), now_ms()
if not r then return 0 end
if r.tombstoned > 0 then
  if now - r.tombstoned <= grace then return 0 end
  redis.call('HDEL', registry, 'h' .. ref, 's' .. ref, 't' .. ref)
else
  if now - r.expires <= grace then return 0 end
  bury(registry, r.pointer, now)
  bury(registry, r.newest, now)
  r.pointer, r.newest, r.tombstoned = 0, 0, now
  save_record(registry, ref, r)
end
changed(registry, now)
return 1
