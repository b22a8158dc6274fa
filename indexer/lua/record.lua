-- Shared by the registry scripts. A registry is a HASH, one per namespace:
--   g        generation: changes with every pointer, registration or state, not with a mere renewal
--   i        newest incarnation handed out
--   p        replication id of the server that handed it out
--   h<ref>   header of a replica's record, the only part scripts look into
--   s<ref>   what was declared about the replica (opaque)
--   t<ref>   what its consumer last reported (opaque)
--   x<u32le> a dead incarnation: server time of death, ms
local HEADER = '<I4I4ddHc0Hc0'

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Names the server's history of writes: another server that took over has another one. Empty if we may not ask.
local function replication_id()
  local info = redis.pcall('INFO', 'replication')
  return type(info) == 'string' and string.match(info, 'master_replid:(%x+)') or ''
end

local function read_record(registry, ref)
  local raw = redis.call('HGET', registry, 'h' .. ref)
  if not raw then return nil end
  local r = {}
  r.pointer, r.newest, r.expires, r.tombstoned, r.owner, r.standing = struct.unpack(HEADER, raw)
  return r
end

local function save_record(registry, ref, r)
  redis.call('HSET', registry, 'h' .. ref, struct.pack(HEADER,
    r.pointer, r.newest, r.expires, r.tombstoned, #r.owner, r.owner, #r.standing, r.standing))
end

-- Starts from the time, so that a registry that was lost does not come back under a generation a reader knows.
local function changed(registry, now)
  if redis.call('HINCRBY', registry, 'g', 1) == 1 then redis.call('HSET', registry, 'g', now) end
end

local function bury(registry, incarnation, now)
  if incarnation ~= 0 then redis.call('HSET', registry, 'x' .. struct.pack('<I4', incarnation), now) end
end
