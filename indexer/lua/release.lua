-- Remove a registration.
-- KEYS[1] registry
-- ARGV[1] ref  ARGV[2] '1': only if ARGV[3] owns it  ARGV[3] owner
-- Reply: 1, or 0 if there was none to remove
local registry, ref = KEYS[1], ARGV[1]
local r = read_record(registry, ref)
if not r or (ARGV[2] == '1' and r.owner ~= ARGV[3]) then return 0 end
local now = now_ms()
redis.call('HDEL', registry, 'h' .. ref, 's' .. ref, 't' .. ref)
bury(registry, r.pointer, now)
bury(registry, r.newest, now)
changed(registry, now)
return 1
