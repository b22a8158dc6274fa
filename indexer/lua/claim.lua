-- Register a replica, or take a new incarnation of one this owner has or whose lease ran out.
-- KEYS[1] registry
-- ARGV[1] ref  ARGV[2] owner  ARGV[3] lease, ms  ARGV[4] '1' to move the pointer at once  ARGV[5] epoch, s
-- ARGV[6] spec  ARGV[7] status of a new life  ARGV[8] its standing  ARGV[9] random number
-- Reply: {incarnation, incarnation pointed at before or 0}; {0, ms left}: another owner's lease runs
local registry, ref, owner, activate = KEYS[1], ARGV[1], ARGV[2], ARGV[4] == '1'
local now = now_ms()
local r = read_record(registry, ref)
if r and r.tombstoned == 0 and r.owner ~= owner and now < r.expires then
  return {0, math.ceil(r.expires - now)}
end

-- A registry that lost its counter starts some random way ahead of time: numbers may have been ahead as well. One that
-- came with another server may lack the newest numbers and generations, so both skip more than can be missing.
local last, seconds = redis.call('HGET', registry, 'i'), math.floor(now / 1000) - tonumber(ARGV[5])
local history, step = replication_id(), 1
if last and redis.call('HGET', registry, 'p') ~= history then
  step = 65536
  redis.call('HINCRBY', registry, 'g', step)
end
local incarnation = last and math.max(last + step, seconds) or seconds + tonumber(ARGV[9])
if incarnation > 1073741823 then return redis.error_reply('ERR incarnations of this namespace are used up') end

local previous = r and r.pointer or 0
if r and r.newest ~= previous then bury(registry, r.newest, now) end
if activate then bury(registry, previous, now) end
if not r or activate then
  redis.call('HSET', registry, 't' .. ref, ARGV[7])
end
redis.call('HSET', registry, 'i', incarnation, 'p', history, 's' .. ref, ARGV[6])
save_record(registry, ref, {
  pointer = activate and incarnation or previous,
  newest = incarnation,
  expires = now + tonumber(ARGV[3]),
  tombstoned = 0,
  owner = owner,
  standing = (not r or activate) and ARGV[8] or r.standing,
})
changed(registry, now)
return {incarnation, previous}
