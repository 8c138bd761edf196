"""The transactions of `RedisLog`, as Lua scripts: each runs on the server as a whole, and alone.

The keys, all with one hash tag, so that they are on one server of a cluster:

    {name}:log       hash    facts of the log: owner, run, until_ms, closed, version; how much ever:
                             added (bytes), claimed, aside; and `born`, a random name of the data,
                             which is part of a position
    {name}:samples   stream  the entries: n (number, or nothing), b (payload), t (`added` before it)
    {name}:work      hash    number -> "version attempt offered_ms", for all outstanding groups
    {name}:free      zset    numbers that are free, scored by themselves
    {name}:leased    zset    numbers that an actor has, scored by the end of the lease in ms
    {name}:leases    hash    number -> "token actor" of its lease
    {name}:tokens    hash    token -> number, so that a repeated `lease` returns what it took
    {name}:aside     stream  what was set aside: p (position), n, b, r (reason)
    {name}:kept      hash    position -> its id in `aside`

The last argument of each script is the time in ms, or nothing for the server's time. Numbers are
below 2^53, which a Lua number and a score hold exactly.
"""

from __future__ import annotations

KEYS = ("log", "samples", "work", "free", "leased", "leases", "tokens", "aside", "kept")

PRELUDE = """
local LOG, SAMPLES, WORK, FREE, LEASED, LEASES, TOKENS, ASIDE, KEPT = unpack(KEYS)

local CLOCK = table.remove(ARGV)
local function now_ms()
  if CLOCK ~= '' then return tonumber(CLOCK) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function fact(name)
  return redis.call('HGET', LOG, name)
end

-- A server without memory refuses the first writing command of a script if it needs memory. Scripts
-- that store next to nothing, and without which nothing would be freed, begin with one that does not.
local function also_when_full()
  redis.call('ZREM', FREE, '')
end

-- An error if `owner` does not own the log.
local function disowned(owner)
  local have = fact('owner')
  if not have then return redis.error_reply('LUDICLOST nobody owns the log') end
  if have ~= owner then return redis.error_reply('LUDICOWNER ' .. have) end
end

-- version, attempt, offered_ms of an outstanding number, as text; nothing for any other.
local function facts_of(number)
  local text = redis.call('HGET', WORK, number)
  if text then return string.match(text, '^(%S+) (%S+) (%S+)$') end
end

local function drop_lease(number)
  local lease = redis.call('HGET', LEASES, number)
  if lease then
    redis.call('HDEL', TOKENS, string.match(lease, '^%S+'))
    redis.call('HDEL', LEASES, number)
  end
  redis.call('ZREM', LEASED, number)
end

local function give_lease(number, token, actor, ends_ms)
  drop_lease(number)
  redis.call('ZREM', FREE, number)
  redis.call('ZADD', LEASED, string.format('%.0f', ends_ms), number)
  redis.call('HSET', LEASES, number, token .. ' ' .. actor)
  redis.call('HSET', TOKENS, token, number)
end

local function drop_work(number)
  drop_lease(number)
  redis.call('ZREM', FREE, number)
  redis.call('HDEL', WORK, number)
end

-- Whether the number is outstanding as it was leased.
local function as_leased(run, number, version)
  return fact('run') == run and fact('closed') == '0' and facts_of(number) == version
end

local function append(number, payload)
  redis.call('XADD', SAMPLES, '*', 'n', number, 'b', payload, 't', fact('added') or '0')
  redis.call('HINCRBY', LOG, 'added', #payload)
end
"""

# owner run ttl_ms born
CLAIM = """
also_when_full()
local owner, run, born = ARGV[1], ARGV[2], ARGV[4]
local now, had = now_ms(), fact('run')
if had and had ~= run then
  if fact('closed') ~= '1' and now < tonumber(fact('until_ms')) then
    return redis.error_reply('LUDICOWNER ' .. fact('owner') .. ' of run ' .. had)
  end
  redis.call('DEL', unpack(KEYS))
end
redis.call('HSET', LOG, 'owner', owner, 'run', run, 'until_ms', string.format('%.0f', now + ARGV[3]), 'closed', '0')
redis.call('HSETNX', LOG, 'born', born)
return 1
"""

# owner ttl_ms
RENEW_CLAIM = """
also_when_full()
local refused = disowned(ARGV[1])
if refused then return refused end
redis.call('HSET', LOG, 'until_ms', string.format('%.0f', now_ms() + ARGV[2]))
return 1
"""

# owner, then number version attempt of each group
OFFER = """
also_when_full()
local refused = disowned(ARGV[1])
if refused then return refused end
local new, now = 0, string.format('%.0f', now_ms())
for i = 2, #ARGV, 3 do
  local number, version, attempt = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local had, _, offered = facts_of(number)
  if had ~= version then
    if had then drop_lease(number) else new = new + 1 end
    redis.call('HSET', WORK, number, version .. ' ' .. attempt .. ' ' .. (offered or now))
    redis.call('ZADD', FREE, number, number)
  end
end
return new
"""

# owner, then numbers
WITHDRAW = """
also_when_full()
local refused = disowned(ARGV[1])
if refused then return refused end
for i = 2, #ARGV do drop_work(ARGV[i]) end
return 1
"""

# -> for each number: number version attempt age_ms actor
OUTSTANDING = """
local now, outstanding = now_ms(), {}
local all = redis.call('HGETALL', WORK)
for i = 1, #all, 2 do
  local number = all[i]
  local version, attempt, offered = string.match(all[i + 1], '^(%S+) (%S+) (%S+)$')
  local ends, actor = redis.call('ZSCORE', LEASED, number), ''
  if ends and tonumber(ends) > now then
    actor = string.match(redis.call('HGET', LEASES, number), '^%S+ (.*)$')
  end
  outstanding[#outstanding + 1] = {number, version, attempt, string.format('%.0f', now - offered), actor}
end
return outstanding
"""

# the `born` and the id of the position, or nothing; limit -> born, entries
READ = """
local born = fact('born')
if not born then return {'', {}} end
local from = '-'
if ARGV[1] == born then from = '(' .. ARGV[2] end
return {born, redis.call('XRANGE', SAMPLES, from, '+', 'COUNT', ARGV[3])}
"""

# owner, the `born` and the id of the position
FORGET = """
local refused = disowned(ARGV[1])
if refused then return refused end
if fact('born') == ARGV[2] then
  local ms, count = string.match(ARGV[3], '^(%d+)-(%d+)$')
  redis.call('XTRIM', SAMPLES, 'MINID', ms .. '-' .. string.format('%.0f', count + 1))
end
return 1
"""

# owner version
ANNOUNCE = """
also_when_full()
local refused = disowned(ARGV[1])
if refused then return refused end
redis.call('HSET', LOG, 'version', ARGV[2])
return 1
"""

# position number payload reason how-many-to-keep
SET_ASIDE = """
if redis.call('HEXISTS', KEPT, ARGV[1]) == 1 then return 0 end
local function copy(payload, reason)
  return redis.pcall('XADD', ASIDE, '*', 'p', ARGV[1], 'n', ARGV[2], 'b', payload, 'r', reason)
end
local id = copy(ARGV[3], ARGV[4])
if type(id) == 'table' then  -- no memory: without it, the trainer could not go on to what it may forget
  also_when_full()
  id = copy('', ARGV[4] .. ' (its ' .. #ARGV[3] .. ' bytes are not kept, since the server is full)')
  if type(id) == 'table' then return id end
end
redis.call('HSET', KEPT, ARGV[1], id)
redis.call('HINCRBY', LOG, 'aside', 1)
local surplus = redis.call('XLEN', ASIDE) - ARGV[5]
if surplus > 0 then
  for _, old in ipairs(redis.call('XRANGE', ASIDE, '-', '+', 'COUNT', surplus)) do
    redis.call('HDEL', KEPT, old[2][2])
    redis.call('XDEL', ASIDE, old[1])
  end
end
return 1
"""

# -> entries bytes outstanding leased oldest_ms aside claimed
STATS = """
local now, bytes, oldest = now_ms(), 0, 0
local first = redis.call('XRANGE', SAMPLES, '-', '+', 'COUNT', 1)[1]
if first then bytes = fact('added') - first[2][6] end
for _, text in ipairs(redis.call('HVALS', WORK)) do
  oldest = math.max(oldest, now - string.match(text, '(%S+)$'))
end
return {redis.call('XLEN', SAMPLES), string.format('%.0f', bytes), redis.call('HLEN', WORK),
  redis.call('ZCOUNT', LEASED, string.format('(%.0f', now), '+inf'), string.format('%.0f', oldest),
  fact('aside') or '0', fact('claimed') or '0'}
"""

# owner
CLOSE = """
local refused = disowned(ARGV[1])
if refused then return refused end
redis.call('DEL', SAMPLES, WORK, FREE, LEASED, LEASES, TOKENS)
redis.call('HDEL', LOG, 'born', 'added')
redis.call('HSET', LOG, 'closed', '1')
return 1
"""

# actor token lease_ms -> number version attempt run, or nothing
LEASE = """
local actor, token, now = ARGV[1], ARGV[2], now_ms()
local function answer(number)
  local version, attempt = facts_of(number)
  return {number, version, attempt, fact('run')}
end
local taken = redis.call('HGET', TOKENS, token)
if taken then return answer(taken) end
if fact('closed') ~= '0' then return nil end
local number, ran_out = redis.call('ZRANGE', FREE, 0, 0)[1], false
for _, late in ipairs(redis.call('ZRANGEBYSCORE', LEASED, '-inf', string.format('%.0f', now))) do
  if not number or tonumber(late) < tonumber(number) then number, ran_out = late, true end
end
if not number then return nil end
local version, attempt, offered = facts_of(number)
if ran_out then
  redis.call('HINCRBY', LOG, 'claimed', 1)
  redis.call('HSET', WORK, number, version .. ' ' .. (attempt + 1) .. ' ' .. offered)
end
give_lease(number, token, actor, now + ARGV[3])
return answer(number)
"""

# run number version token actor lease_ms
RENEW = """
also_when_full()
local run, number, version, token, actor, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], now_ms()
if not as_leased(run, number, version) then return 0 end
local ends = redis.call('ZSCORE', LEASED, number)
local somebodys = ends and tonumber(ends) > now
if somebodys and redis.call('HGET', TOKENS, token) ~= number then return 0 end
give_lease(number, token, actor, now + ARGV[6])
return 1
"""

# number token
GIVE_BACK = """
also_when_full()
if redis.call('HGET', TOKENS, ARGV[2]) ~= ARGV[1] then return 0 end
redis.call('ZADD', FREE, ARGV[1], ARGV[1])
drop_lease(ARGV[1])
return 1
"""

# run number version payload
DELIVER = """
if not as_leased(ARGV[1], ARGV[2], ARGV[3]) then return 0 end
append(ARGV[2], ARGV[4])
drop_work(ARGV[2])
return 1
"""

# payload max_entries born
PUSH = """
if redis.call('XLEN', SAMPLES) >= tonumber(ARGV[2]) then return 0 end
redis.call('HSETNX', LOG, 'born', ARGV[3])
append('', ARGV[1])
return 1
"""
