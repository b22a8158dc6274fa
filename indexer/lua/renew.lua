-- Extend a lease and publish what the consumer reports.
-- KEYS[1] registry
-- ARGV[1] ref  ARGV[2] owner  ARGV[3] incarnation  ARGV[4] lease, ms  ARGV[5] status  ARGV[6] standing
-- Reply: 1, or 0 when superseded
local registry, ref, incarnation = KEYS[1], ARGV[1], tonumber(ARGV[3])
local r = read_record(registry, ref)
if not r or r.tombstoned > 0 or r.owner ~= ARGV[2] then return 0 end
if r.newest ~= incarnation and r.pointer ~= incarnation then return 0 end
local now = now_ms()
if r.standing ~= ARGV[6] or now >= r.expires then changed(registry, now) end
r.expires, r.standing = now + tonumber(ARGV[4]), ARGV[6]
save_record(registry, ref, r)
redis.call('HSET', registry, 't' .. ref, ARGV[5])
return 1
