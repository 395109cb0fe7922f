"""The Lua scripts of the log on Redis: each one is atomic on the server.

Everything is checked before the first write, since a script that fails half way is not undone.
Sequence numbers and epochs stay below 2^53, where Lua's numbers are exact.
"""

from __future__ import annotations

_IDS = """
local function epoch_of(id) return tonumber(string.match(id, '^(%d+)-')) end
local function seq_of(id) return tonumber(string.match(id, '-(%d+)$')) end
local function text(number) return string.format('%.0f', number) end
"""

START_EPOCH = _IDS + """
-- KEYS log epoch; ARGV nonce. Above the held epoch, and above the log should that be lost.
local number = tonumber(redis.call('HGET', KEYS[2], 'number') or '0')
local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if top[1] then number = math.max(number, epoch_of(top[1][1])) end
redis.call('HSET', KEYS[2], 'number', text(number + 1), 'nonce', ARGV[1])
return number + 1
"""

APPEND = _IDS + """
-- KEYS log epoch cursor acked nodes [orders...]
-- ARGV epoch expect cursor num_records num_acked num_orders
--      [record]... [source source_seq]... [record_index orders_index]... [node]...
local held = redis.call('HGET', KEYS[2], 'number')
if held ~= ARGV[1] then return {'fenced', held or '0'} end
local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local last = top[1] and seq_of(top[1][1]) or 0
if last ~= tonumber(ARGV[2]) then return {'conflict', text(last)} end
local records, acked, orders = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local at = 6
for i = 1, records do
  redis.call('XADD', KEYS[1], ARGV[1] .. '-' .. text(last + i), 'r', ARGV[at + i])
end
at = at + records
for _ = 1, acked do
  redis.call('HSET', KEYS[4], ARGV[at + 1], ARGV[at + 2])
  at = at + 2
end
for _ = 1, orders do
  local index = tonumber(ARGV[at + 1])
  redis.call('XADD', KEYS[5 + tonumber(ARGV[at + 2])], ARGV[1] .. '-' .. text(last + index),
             'r', ARGV[6 + index])
  at = at + 2
end
for i = at + 1, #ARGV do redis.call('SADD', KEYS[5], ARGV[i]) end
if ARGV[3] ~= '' then redis.call('SET', KEYS[3], ARGV[3]) end
return {'done', text(last + records)}
"""

REBUILD_ORDERS = """
-- KEYS epoch nodes [orders...]; ARGV epoch num_orders [orders_index seq record]... [node]...
local held = redis.call('HGET', KEYS[1], 'number')
if held ~= ARGV[1] then return {'fenced', held or '0'} end
for i = 2, #KEYS do redis.call('DEL', KEYS[i]) end
local at = 2
for _ = 1, tonumber(ARGV[2]) do
  redis.call('XADD', KEYS[2 + tonumber(ARGV[at + 1])], ARGV[1] .. '-' .. ARGV[at + 2],
             'r', ARGV[at + 3])
  at = at + 3
end
for i = at + 1, #ARGV do redis.call('SADD', KEYS[2], ARGV[i]) end
return {'done', ''}
"""

FIND_SEQ = _IDS + """
-- KEYS log; ARGV seq. The id that the record `seq` has, found by halving the epochs; nil if the
-- log ends before it. The first seq at or above an epoch grows with the epoch.
local seq = tonumber(ARGV[1])
local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if not top[1] or seq_of(top[1][1]) < seq then return nil end
local low, high = 0, epoch_of(top[1][1])
while low < high do
  local middle = math.ceil((low + high) / 2)
  local first = redis.call('XRANGE', KEYS[1], text(middle) .. '-0', '+', 'COUNT', 1)
  if seq_of(first[1][1]) <= seq then low = middle else high = middle - 1 end
end
return text(low) .. '-' .. text(seq)
"""

BEAT = """
-- KEYS beats; ARGV node incarnation. By the server's clock; the newest incarnation stays.
local now = redis.call('TIME')
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and tonumber(string.match(held, '^(%d+) ')) > tonumber(ARGV[2]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1],
           ARGV[2] .. ' ' .. now[1] .. '.' .. string.format('%06d', tonumber(now[2])))
return 1
"""

BEATS = """
-- KEYS beats
return {redis.call('TIME'), redis.call('HGETALL', KEYS[1])}
"""
