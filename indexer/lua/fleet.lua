-- One consistent read of a registry, with the server time its leases are judged by.
-- KEYS[1] registry
-- Reply: {server time, ms; {field, value, ...}}
return {now_ms(), redis.call('HGETALL', KEYS[1])}
