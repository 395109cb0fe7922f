"""The log on Redis or Valkey streams, fenced by epoch: the only module that imports redis.

Only the connection and the parser of redis-py are used. Its client retries automatically, so it
would write an append twice if the reply was lost. Here every call states what a lost reply means.
"""

import asyncio
import hashlib
import math
import re
import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, NamedTuple, cast

import msgspec
import structlog
from redis import exceptions
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from .. import errors, network_address, tls, unix_socket
from ..decoding import Decoder, from_msgpack
from ..errors import (
    Ambiguous,
    Conflict,
    CorruptLog,
    Fenced,
    LogError,
    TooLarge,
    Unavailable,
    UsageError,
)
from ..object_storage import reason
from ..process_io import Seldom
from ..records import codec
from ..records.envelope import Record, Report, order_nodes
from ..spec.job import NAME
from ..spec.policy import Policy
from . import durability
from .identity import (
    Identities,
    Keys,
    StoreKeys,
    is_order_signed,
    order_keys,
    password_hash,
    sign_order,
    sign_report,
    user_name,
)
from .intake import read_report
from .port import (
    APPEND_BYTES_MAX,
    REPORT_BYTES_MAX,
    Batch,
    FilePart,
    FileRequest,
    Heartbeat,
    Rejected,
    Sent,
    SentOrder,
    key_prefix,
    size_error,
)
from .segments import Folder, SealedLog, Segment

# --- Lua scripts: each one is atomic on the server ---
#
# A script checks everything before its first write, because a failed script is not rolled back.
# Sequence numbers and epochs stay below 2^53, where Lua's numbers are exact.

_IDS = """
local function epoch_of(id) return tonumber(string.match(id, '^(%d+)-')) end
local function seq_of(id) return tonumber(string.match(id, '-(%d+)$')) end
local function text(number) return string.format('%.0f', number) end
"""

START_EPOCH = (
    _IDS
    + """
-- KEYS log epoch lease followers; ARGV nonce lease_ms url secret above
-- Above the stored epoch, above the log if that key is lost, and above what the caller knows.
local lease = redis.call('HMGET', KEYS[3], 'nonce', 'url', 'secret')
local is_mine = lease[1] == ARGV[1] or lease[1] == '' and lease[2] == ARGV[3]
if lease[1] and not is_mine then
  redis.call('ZADD', KEYS[4], redis.call('TIME')[1], ARGV[3])
  return {0, lease[2], lease[3]}
end
local number = math.max(tonumber(redis.call('HGET', KEYS[2], 'number') or '0'), tonumber(ARGV[5]))
local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if top[1] then number = math.max(number, epoch_of(top[1][1])) end
redis.call('HSET', KEYS[2], 'number', text(number + 1), 'nonce', ARGV[1])
if ARGV[2] ~= '0' then
  redis.call('HSET', KEYS[3], 'nonce', ARGV[1], 'url', ARGV[3], 'secret', ARGV[4],
             'epoch', text(number + 1))
  redis.call('PEXPIRE', KEYS[3], ARGV[2])
end
redis.call('ZREM', KEYS[4], ARGV[3])
return {number + 1}
"""
)

RENEW = """
-- KEYS epoch lease followers; ARGV nonce lease_ms url secret epoch
-- Also a lease that has ended, while no other control plane has taken the log.
local held = redis.call('HMGET', KEYS[1], 'number', 'nonce')
if held[1] ~= ARGV[5] or held[2] ~= ARGV[1] then return {'fenced', held[1] or '0'} end
redis.call('HSET', KEYS[2], 'nonce', ARGV[1], 'url', ARGV[3], 'secret', ARGV[4], 'epoch', ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', redis.call('TIME')[1] - 3)
return {'done', '', unpack(redis.call('ZRANGE', KEYS[3], 0, -1))}
"""

RELEASE = """
-- KEYS lease epoch; ARGV nonce lease_ms url. A RENEW that arrives later is fenced.
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return end
redis.call('HSET', KEYS[2], 'nonce', '')
if ARGV[3] == '' then return redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], 'nonce', '', 'url', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

KEEP_TOKENS = """
-- KEYS epoch tokens; ARGV epoch tokens
local held = redis.call('HGET', KEYS[1], 'number')
if held ~= ARGV[1] then return {'fenced', held or '0'} end
redis.call('SET', KEYS[2], ARGV[2])
return {'done', ''}
"""

APPEND = (
    _IDS
    + """
-- KEYS log epoch cursor acked nodes [orders...]
-- ARGV epoch expect cursor num_records num_acked num_orders part
--      [record]... [source source_seq]... [record_index orders_index copy signature keys]...
--      [node]...
-- copy: what the agent reads; empty: the record.
-- part: `all`; or `log`, and when replicas have that, `rest`: what agents may act upon.
local held = redis.call('HGET', KEYS[2], 'number')
if held ~= ARGV[1] then return {'fenced', held or '0'} end
local top = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
local last = top[1] and seq_of(top[1][1]) or 0
local records, acked, orders = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local first, part, at = tonumber(ARGV[2]), ARGV[7], 7
if last ~= first + (part == 'rest' and records or 0) then return {'conflict', text(last)} end
if part ~= 'rest' then
  for i = 1, records do
    redis.call('XADD', KEYS[1], ARGV[1] .. '-' .. text(first + i), 'r', ARGV[at + i])
  end
  if ARGV[3] ~= '' then redis.call('SET', KEYS[3], ARGV[3]) end
end
if part == 'log' then return {'done', text(first + records)} end
at = at + records
for _ = 1, acked do
  redis.call('HSET', KEYS[4], ARGV[at + 1], ARGV[at + 2])
  at = at + 2
end
for _ = 1, orders do
  local index, copy = tonumber(ARGV[at + 1]), ARGV[at + 3]
  if copy == '' then copy = ARGV[7 + index] end
  redis.call('XADD', KEYS[5 + tonumber(ARGV[at + 2])], ARGV[1] .. '-' .. text(first + index),
             'r', copy, 's', ARGV[at + 4], 'k', ARGV[at + 5])
  at = at + 5
end
for i = at + 1, #ARGV do redis.call('SADD', KEYS[5], ARGV[i]) end
return {'done', text(first + records)}
"""
)

REBUILD_ORDERS = """
-- KEYS epoch acked nodes [orders...]
-- ARGV epoch num_orders num_acked [orders_index seq record signature keys]...
--      [source source_seq]... [node]...
local held = redis.call('HGET', KEYS[1], 'number')
if held ~= ARGV[1] then return {'fenced', held or '0'} end
for i = 3, #KEYS do redis.call('DEL', KEYS[i]) end
local at = 3
for _ = 1, tonumber(ARGV[2]) do
  redis.call('XADD', KEYS[3 + tonumber(ARGV[at + 1])], ARGV[1] .. '-' .. ARGV[at + 2],
             'r', ARGV[at + 3], 's', ARGV[at + 4], 'k', ARGV[at + 5])
  at = at + 5
end
for _ = 1, tonumber(ARGV[3]) do
  redis.call('HSET', KEYS[2], ARGV[at + 1], ARGV[at + 2])
  at = at + 2
end
for i = at + 1, #ARGV do redis.call('SADD', KEYS[3], ARGV[i]) end
return {'done', ''}
"""

SEAL = (
    _IDS
    + """
-- KEYS log epoch head [orders...]; ARGV epoch former_head head first_id last_id [open_seq]...
local held = redis.call('HGET', KEYS[2], 'number')
if held ~= ARGV[1] then return {'fenced', held or '0'} end
local head = redis.call('GET', KEYS[3]) or ''
if head ~= ARGV[2] then return {'conflict', head} end
redis.call('SET', KEYS[3], ARGV[3])
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[4])
local open = {}
for i = 6, #ARGV do open[ARGV[i]] = true end
for i = 4, #KEYS do
  for _, entry in ipairs(redis.call('XRANGE', KEYS[i], '-', ARGV[5])) do
    if not open[text(seq_of(entry[1]))] then redis.call('XDEL', KEYS[i], entry[1]) end
  end
end
return {'done', ''}
"""
)

FIND_SEQ = (
    _IDS
    + """
-- KEYS log; ARGV seq. The id of the record `seq`, by binary search over the epochs; nil if the
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
)

_BYTES = """
-- What a key takes on the server; 0 where that is not told, for managed services refuse MEMORY.
local function bytes_of(key, samples)
  local size = redis.pcall('MEMORY', 'USAGE', key, 'SAMPLES', samples)
  return type(size) == 'number' and size or 0
end
"""

TAKE = (
    _BYTES
    + """
-- KEYS bell shared reports senders
-- ARGV lists after num_max node_num_max node_bytes_max report_bytes_max list_num_max
--      list_bytes_max looks_at_all woken_by [node]...
-- Moves entries of the nodes' lists to the intake's stream: one of each list, then one of each
-- again, until there are `num_max` or none is left; so many and so much of each list. It looks at
-- the shared list, at those of `node`, and at those whose nodes have rung the bell since the last
-- time; with `looks_at_all`, or when the bell is larger than nodes make it, at all.
-- woken_by: the first entry of the shared list, if a reader has taken it.
-- Returns {node, taken, left, dropped} of each list that had any; and the stream's entries after
-- `after`.
local reports, num_max, node_num_max = KEYS[3], tonumber(ARGV[3]), tonumber(ARGV[4])
local node_bytes_max, report_bytes_max = tonumber(ARGV[5]), tonumber(ARGV[6])
local list_num_max, list_bytes_max = tonumber(ARGV[7]), tonumber(ARGV[8])
local function put(node, entry)
  local size = #entry
  if size > report_bytes_max then entry = string.sub(entry, 1, 1024) end
  redis.call('XADD', reports, '*', 'r', entry, 'n', node, 'b', size)
  return size
end
local busy, seen = {}, {}
local function look(node)
  if seen[node] then return end
  seen[node] = true
  local key = node == '' and KEYS[2] or ARGV[1] .. node
  if redis.call('LLEN', key) > 0 then table.insert(busy, {node, key, 0, 0, false}) end
end
local function look_if_sender(node)
  if node == '' or redis.call('SISMEMBER', KEYS[4], node) == 1 then look(node) end
end
if ARGV[10] ~= '' then put('', ARGV[10]) end
local found = redis.call('XRANGE', reports, '(' .. ARGV[2], '+', 'COUNT', num_max)
local room = num_max - #found
for i = 11, #ARGV do look_if_sender(ARGV[i]) end
local rings = redis.call('LLEN', KEYS[1])
local are_many = rings > 2 * redis.call('SCARD', KEYS[4]) + 64
if ARGV[9] == '1' or are_many or bytes_of(KEYS[1], 0) > 1048576 then
  for _, node in ipairs(redis.call('SMEMBERS', KEYS[4])) do look(node) end
else
  for _, node in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do look_if_sender(node) end
end
look('')
redis.call('DEL', KEYS[1])
local moved = room > 0
while moved and room > 0 do
  moved = false
  for _, list in ipairs(busy) do
    if room > 0 and list[3] < node_num_max and list[4] < node_bytes_max and not list[5] then
      local entry = redis.call('LPOP', list[2])
      if entry then
        list[3], list[4], moved = list[3] + 1, list[4] + put(list[1], entry), true
        room = room - 1
      else
        list[5] = true
      end
    end
  end
end
local lists = {}
for _, list in ipairs(busy) do
  local num = list[5] and 0 or redis.call('LLEN', list[2])
  local kept = math.min(num, list_num_max)
  if kept < num then redis.call('LTRIM', list[2], 0, kept - 1) end
  while kept > 0 and bytes_of(list[2], 5) > list_bytes_max do
    kept = math.floor(kept / 2)
    if kept > 0 then redis.call('LTRIM', list[2], 0, kept - 1) else redis.call('DEL', list[2]) end
  end
  table.insert(lists, {list[1], list[3], kept, num - kept})
end
if #busy > 0 then
  found = redis.call('XRANGE', reports, '(' .. ARGV[2], '+', 'COUNT', num_max)
end
return {lists, found}
"""
)

BEATS = (
    _BYTES
    + """
-- KEYS [beat]... [other]...; ARGV num_kept bytes_max num_beats
-- The id of each node's newest heartbeat, its incarnation (the newest of the last few), its spool.
-- A node may write anything to its keys: numbers have at most 15 digits, and a key larger than an
-- agent ever makes it is dropped.
local function whole(text)
  return text and #text < 16 and string.match(text, '^%d+$') and tonumber(text) or 0
end
local beats = {}
for _, key in ipairs(KEYS) do
  if bytes_of(key, 0) > tonumber(ARGV[2]) then redis.pcall('UNLINK', key) end
end
for i = 1, tonumber(ARGV[3]) do
  local id, incarnation, spooled = '', 0, 0
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[i], '+', '-', 'COUNT', ARGV[1])) do
    local own = whole(entry[2][2])
    if own > incarnation then id, incarnation, spooled = entry[1], own, whole(entry[2][4]) end
  end
  for _, value in ipairs({id, incarnation, spooled}) do beats[#beats + 1] = value end
end
return {redis.call('TIME'), beats}
"""
)

CONNECT_S_MAX = 5.0
SENTINEL_S_MAX = 1.0
"""Time for the answer of a Sentinel; then the next one is asked."""
FULL_S_MAX = 0.5
CLIENTS_NUM_MAX = 10_000
"""What a server takes that does not say it."""
REPLY_S_MAX = 10.0
"""Time for a reply, in addition to the time that the command itself waits on the server."""
REPLICAS_S_MAX = 2.0
"""Time for replicas to have an append, and again to have it on their disks."""
TRIES_MAX = 2
"""Tries of a call that may be repeated: an open connection may belong to an earlier server."""
SEND_NUM_MAX = 500
"""Reports in one command."""
NODE_NUM_MAX, NODE_BYTES_MAX = 32, 256 << 10
"""How many entries of one node's list, and of which size together, a `take` moves at most."""
LIST_NUM_MAX, LIST_BYTES_MAX = 1 << 16, 64 << 20
"""What a node's list may have; beyond, the newest entries are dropped. An agent has at most 16 MiB
of reports that are not acknowledged, some 50,000, and sends again what does not arrive."""
WAITED_NUM_MAX = 4096
"""After so many entries of a node whose list was never empty meanwhile, no deadline waits for the
rest. An agent sends at most 1,024 reports that are not acknowledged, now and then again."""
NAME_BYTES_MAX = 256
"""Of what a node rings with, which may be anything, so much is read."""
LOOK_AT_ALL_S = 1.0
"""Longest time between two looks at the lists of all nodes. Between them only those are looked at
that have rung, or had something left: a look at 1,024 lists takes the server 1 ms (measured)."""
BEATS_NUM_KEPT = 4
"""Heartbeats that a node's stream keeps, for two agents of one node at the same time."""
NODE_KEY_BYTES_MAX = 1 << 18
"""What a node's heartbeats, or the parts of a file that wait, take on the server at most. A part
has 64 kB."""
LOOKS_NUM = 16
"""Looks at the heartbeats of a node for one look at its parts of files."""
BEATS_NUM_MAX = 256
"""Nodes whose heartbeats are read by one script: about 1 ms of the server (measured)."""
USERS_NUM_MAX = 64
"""Users in one pipeline, so that appends pass between two of them."""
FORGED_LOG_S = 1.0
"""Shortest time between two lines about orders that are dropped."""
ORDERS_NUM_MAX = 1000
"""Orders in one reply; the caller continues after the last of these."""
READ_NUM_MAX, READ_BYTES_MAX = 100, 32 << 20
"""Records in one reply: as fast as more of them (measured), and a record may have a megabyte. A
read ends with the reply that reaches READ_BYTES_MAX."""
VERSION_MIN, WAITAOF_VERSION_MIN = (6, 2), (7, 2)
URL_HINT = "redis://:PASSWORD@HOST:PORT/0, rediss://... or unix://:PASSWORD@/PATH"
TRANSIENT = (
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
)
TRANSIENT_CODES = (
    "OOM",
    "MISCONF",
    "BUSY",
    "NOREPLICAS",
    "READONLY",
    "CLUSTERDOWN",
    "WAIT",
    "UNBLOCKED",
)

Command = tuple[bytes | str | int, ...]
_Entry = tuple[bytes, list[bytes]]
"""The id and the fields of a stream's entry."""
_file_parts = Decoder(FilePart)
_logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


def _sent(entry: bytes, fields: Sequence[bytes]) -> Sent:
    """An entry of the intake's stream. Leaders of release 0.3.0 have put it there without a node
    and a size."""
    node, num_bytes = (fields[3], fields[5]) if len(fields) > 2 else (b"", len(fields[1]))
    return Sent(cursor=entry.decode(), node=node.decode(), data=fields[1], num_bytes=int(num_bytes))


class _Look(NamedTuple):
    """What a `take` has done to a list that was not empty."""

    node: str
    num_taken: int
    num_left: int
    num_dropped: int


class _Heard:
    """What a leader has read of the nodes."""

    def __init__(self) -> None:
        self.beat_ids: dict[str, bytes] = {}
        """By node: the newest heartbeat that `beats` has returned."""
        self.beat_looks = 0
        """How often `beats` has looked."""
        self.taken: dict[str, int] = {}
        """By node whose list was not empty at the last look: entries taken since it was. In the
        order of the next `take`."""
        self.looked_s = -math.inf
        """When a `take` has last looked at all lists."""
        self.last = ""
        """The last entry of the intake's stream at the last `take`; "": it is not known."""

    def note(self, looks: Sequence[_Look]) -> bool:
        """Note a `take`. Whether no list has anything for which a deadline waits."""
        self.taken = {
            look.node: self.taken.get(look.node, 0) + look.num_taken
            for look in sorted(looks, key=lambda look: look.num_taken)  # who got least comes first
            if look.num_left
        }
        return min(self.taken.values(), default=math.inf) >= WAITED_NUM_MAX

    def must_ring(self, after: str) -> bool:
        """Whether a node has to ring before there is anything behind `after`."""
        is_fresh = time.monotonic() - self.looked_s < LOOK_AT_ALL_S
        return is_fresh and not self.taken and after == self.last


class _Lost(Exception):
    """No reply came; the server may have executed the request. `slow`: the wait timed out."""

    def __init__(self, message: str, slow: bool) -> None:
        super().__init__(message)
        self.slow = slow


class _Link:
    """A connection that carries one request at a time and reconnects after an error; each time to
    the server that the Sentinels name then, if the URL is theirs."""

    def __init__(self, url: str, ca: str) -> None:
        self._where = re.sub(r"//[^/@]*@", "//", url)  # without the password
        self._name, url, self._sentinels = network_address.split_sentinels(url)
        self._ca = ca
        try:
            options: dict[str, Any] = dict(parse_url(url))
        except ValueError as error:
            raise UsageError(f"{self._where}: {error}", URL_HINT) from None
        make = options.pop("connection_class", Connection)
        self._socket = str(options.get("path", ""))
        # No socket timeout: each call has its own timeout. With RESP2 the server pushes nothing.
        options |= {
            "socket_timeout": None,
            "socket_connect_timeout": CONNECT_S_MAX,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
        }
        self._connection: Any = make(**options)
        if ca and hasattr(self._connection, "ssl_context"):  # redis-py would add the system's
            self._connection.ssl_context.context = tls.client_context(ca)
        self._lock = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        self._closed = True
        await self._connection.disconnect(nowait=True)

    async def call(self, commands: Sequence[Command], wait_s: float) -> list[Any]:
        """Return the replies; an error reply of the server is a ResponseError among them. Raises
        UsageError (password), Unavailable (nothing was executed) or _Lost."""
        async with self._lock:
            await self._connect()
            connection = self._connection
            try:
                async with asyncio.timeout(wait_s):
                    packed = connection.pack_commands(commands)
                    await connection.send_packed_command(packed, check_health=False)
                    replies = [await self._reply() for _ in commands]
                if any(
                    isinstance(reply, exceptions.ResponseError)
                    and (
                        isinstance(reply, exceptions.ReadOnlyError)
                        or str(reply).startswith("UNBLOCKED")
                    )
                    for reply in replies
                ):
                    # It has become a replica: the URL may lead to another server.
                    await connection.disconnect(nowait=True)
                return replies
            except exceptions.BusyLoadingError:
                raise Unavailable(f"{self._where}: the server is loading its data") from None
            except exceptions.AuthenticationError as error:
                await connection.disconnect(nowait=True)  # other replies are still pending
                raise UsageError(f"{self._where}: {error}", URL_HINT) from None
            except (OSError, exceptions.RedisError) as error:
                await connection.disconnect(nowait=True)
                slow = isinstance(error, TimeoutError)
                what = f"no reply within {wait_s:g} s" if slow else str(error)
                raise _Lost(f"{self._where}: {what}", slow) from None
            except BaseException:
                # Otherwise the next request would read the reply that is still pending.
                await connection.disconnect(nowait=True)
                raise

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except exceptions.ResponseError as refusal:
            return refusal

    async def find_server(self) -> tuple[str, int]:
        """Host and port of the server, by the first Sentinel that answers. Raises Unavailable."""
        why = ""
        for url in self._sentinels:
            sentinel = _Link(url, self._ca)
            try:
                async with asyncio.timeout(SENTINEL_S_MAX):
                    (found,) = await sentinel.call(
                        [("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)], SENTINEL_S_MAX
                    )
            except (Unavailable, UsageError, _Lost) as error:
                why = str(error)
            except TimeoutError:
                why = f"{url}: no answer within {SENTINEL_S_MAX:g} s"
            else:
                if isinstance(found, list):
                    host, port = cast(list[bytes], found)
                    return host.decode(), int(port)
                why = f"{url}: {found or f'it knows no server {self._name}'}"
            finally:
                await sentinel.close()
        raise Unavailable(f"no Sentinel tells where the server is: {why}")

    async def is_full(self) -> bool:
        """Whether the server refuses any further connection. It says so before it is asked; with
        TLS it closes without a word."""
        at = self._connection
        try:
            async with asyncio.timeout(FULL_S_MAX):
                reader, writer = await (
                    asyncio.open_unix_connection(unix_socket.address(self._socket))
                    if self._socket
                    else asyncio.open_connection(at.host, at.port)
                )
                try:
                    said = await reader.read(99)
                finally:
                    writer.close()
        except OSError:  # TimeoutError is one: it waits for a command
            return False
        return b"max number of clients" in said or (not said and hasattr(at, "ssl_context"))

    async def _connect(self) -> None:
        connection = self._connection
        if self._closed:
            raise Unavailable(f"{self._where}: closed")
        try:
            if connection.is_connected and await connection.can_read():
                await connection.disconnect(nowait=True)  # the server has closed it
        except exceptions.RedisError:
            await connection.disconnect(nowait=True)
        try:
            if self._socket:
                connection.path = unix_socket.address(self._socket)
            if self._sentinels and not connection.is_connected:
                connection.host, connection.port = await self.find_server()
            async with asyncio.timeout(CONNECT_S_MAX):
                await connection.connect()
        except BaseException as error:
            await connection.disconnect(nowait=True)  # the handshake is incomplete
            # Over a unix socket, redis-py wraps the errors of the handshake.
            if isinstance(error.__cause__ or error, exceptions.AuthenticationError):
                raise UsageError(f"{self._where}: {error}", URL_HINT) from None
            if isinstance(error, OSError | exceptions.RedisError):
                what = (
                    tls.refusal(error.__context__, "TLS")
                    or str(error)
                    or f"no connection within {CONNECT_S_MAX:g} s"
                )
                raise Unavailable(f"{self._where}: {what}") from None
            raise


def _no_keys(node: str) -> bytes:
    raise AssertionError(f"this reader of the log has no key of {node}")


class RedisLog:
    """The log of one cluster on the server at `url`; connects at the first call.

    A cluster has one log (single writer), one intake of reports (delivery at least once), one
    stream of orders per node, and the latest heartbeats. Methods of the leader raise Conflict (also
    if the server does not know its epoch any more), Fenced, Ambiguous, Unavailable.

    Each blocking reader has a connection of its own; all other calls share one. `keys` sign reports
    and orders and check them. With `identities`, the control plane gives each node a user of its
    own. `ca`: the authorities (PEM) at rediss://; "": the system's. `folder`: where the segments
    are. `policy`: what the leader asks of the server. `has_lists`: whether the leader reads a list
    of each node; one of release 0.3.0 reads only the list that all agents share.
    """

    def __init__(
        self,
        url: str,
        cluster: str,
        keys: Keys = _no_keys,
        identities: Identities | None = None,
        ca: str = "",
        folder: Folder | None = None,
        policy: Policy | None = None,
        has_lists: bool = True,
    ) -> None:
        if not NAME.match(cluster):
            raise UsageError(
                f"{cluster!r} is not a cluster's name",
                "lower-case letters, digits, '-' and '.', at most 63",
            )
        self._url, self._ca, self._policy = url, ca, policy or Policy()
        self._has_waitaof = False
        self._folder, self._has_lists = folder, has_lists
        self._segments: SealedLog | None = None
        self._cluster = cluster
        self._keys_of = keys
        self._identities = identities
        self._forged_orders = Seldom(FORGED_LOG_S)
        self._heard = _Heard()
        self._link = _Link(url, ca)
        self._readers: dict[str, _Link] = {}
        self._read_to = (0, 0)
        """(seq, epoch) of the last record read, so that the next read needs no search."""

    async def close(self) -> None:
        """Close the connections; running calls fail."""
        for link in (self._link, *self._readers.values()):
            await link.close()

    async def find_server(self) -> tuple[str, int]:
        """Where the server is at present, if the URL is of Sentinels. Raises Unavailable."""
        return await self._link.find_server()

    async def move(self, url: str, keys: Keys, *, has_lists: bool = True) -> bool:
        """Use the server at `url`, and these keys, from now on; running calls fail. False if it is
        the present one. Raises UsageError for an invalid URL."""
        self._keys_of, self._has_lists = keys, has_lists
        if url == self._url:
            return False
        link = _Link(url, self._ca)
        old, self._url, self._link = (self._link, *self._readers.values()), url, link
        self._readers, self._read_to = {}, (0, 0)
        for one in old:
            await one.close()
        return True

    async def check(self) -> None:
        """Refuse a server that is too old, or that by its settings would lose what the policy wants
        to be kept. Raises UsageError, Unavailable."""
        settings = await self.settings()
        version = settings.get("redis_version", "0.0")
        number = tuple(int(part) for part in version.split(".")[:2])
        if number < VERSION_MIN:
            raise UsageError(
                f"the server has Redis version {version}; 6.2 or later is required",
                "use Valkey, or a newer Redis",
            )
        self._has_waitaof = number >= WAITAOF_VERSION_MIN
        why, hint = durability.refusal(settings, self._policy)
        if why:
            raise UsageError(why, hint)
        if (evicts := settings.get("maxmemory_policy", "noeviction")) != "noeviction":
            _logger.warning("maxmemory-policy should be noeviction", policy=evicts)

    async def settings(self) -> durability.Settings:
        """The server's INFO, and `appendfsync`. Raises Unavailable."""
        (text,) = await self._ask([("INFO",)])
        found = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        try:
            (pair,) = await self._ask([("CONFIG", "GET", "appendfsync")])
        except LogError as error:
            if isinstance(error, Unavailable | Ambiguous):
                raise
            pair = ()  # managed services forbid CONFIG
        return {**found, "appendfsync": pair[1].decode() if pair else ""}

    async def check_durable(self) -> None:
        """Raises Unavailable while the server cannot keep records as the policy asks."""
        if why := durability.failure(await self.settings(), self._policy):
            raise Unavailable(why)
        await self._replicate()

    async def _replicate(self) -> None:
        """Write, and wait until the replicas that the policy asks for have that, and so all that
        was written before it. Raises Unavailable."""
        num, wait_ms = self._policy.replicas_min, round(1e3 * REPLICAS_S_MAX)
        # WAIT counts from the last write of its own connection.
        commands: list[Command] = [("SET", *self._keys("written"), "")]
        if num:
            commands.append(("WAIT", num, wait_ms))
        if num and self._has_waitaof and self._policy.durability != "none":
            # After WAIT it takes 1 ms; alone up to 1 s, until a replica's next regular answer.
            commands.append(("WAITAOF", 1, num, wait_ms))
        _, *replies = await self._ask(
            commands, link=self._reader("written"), wait_s=2 * REPLICAS_S_MAX + REPLY_S_MAX
        )
        for where, reply in zip(("", " on disk"), replies, strict=False):
            have: int = reply[1] if isinstance(reply, list) else reply  # pyright: ignore
            if have < num:
                raise Unavailable(
                    f"{have} of {num} replicas of the log's server have the last record{where}"
                )

    # --- the leader -----------------------------------------------------------------------------
    async def start_epoch(
        self, nonce: str, *, url: str = "", lease_s: float = 0.0, above: int = 0
    ) -> int:
        """Take the log: start a new epoch above all earlier ones and `above`, which fences older
        leaders. For `lease_s` no other nonce can take it, unless it is released. Raises Leased
        while another one has it, and notes `url` as that of a follower; UsageError if the leader
        has another secret. After a lost reply one epoch is unused."""
        self._heard.taken, self._heard.looked_s = {}, -math.inf
        epoch, *leader = await self._run(
            START_EPOCH,
            self._keys("log", "epoch", "lease", "followers"),
            (nonce, round(1e3 * lease_s), url, self._secret, above),
        )
        if leader and leader[1].decode() != self._secret:
            raise UsageError(
                f"the control plane at {leader[0].decode()} leads, and has another secret",
                "copy the files secret and token from its state folder to this one",
            )
        if leader:
            raise errors.Leased(leader[0].decode())
        return int(epoch)

    async def renew(self, nonce: str, *, epoch: int, url: str, lease_s: float) -> list[str]:
        """Extend the lease by `lease_s` from now; the URLs of the followers. Raises Fenced."""
        args = (nonce, round(1e3 * lease_s), url, self._secret, epoch)
        reply = await self._run(RENEW, self._keys("epoch", "lease", "followers"), args)
        _check_result(reply[:2], epoch, 0)
        return sorted(one.decode() for one in reply[2:])

    async def release(self, nonce: str, *, url: str, lease_s: float) -> None:
        """End this nonce's lease. With `url`, only that follower can take the log for `lease_s`."""
        await self._run(RELEASE, self._keys("lease", "epoch"), (nonce, round(1e3 * lease_s), url))

    async def tokens(self) -> bytes:
        """What `keep_tokens` has stored; empty if nothing."""
        return (await self._ask([("GET", *self._keys("tokens"))]))[0] or b""

    async def keep_tokens(self, tokens: bytes, *, epoch: int) -> None:
        """Store the hashes of the tokens for the next leader. Raises Fenced."""
        reply = await self._run(KEEP_TOKENS, self._keys("epoch", "tokens"), (epoch, tokens))
        _check_result(reply, epoch, 0)

    @property
    def _secret(self) -> str:
        """Tells control planes that have the same secret from others."""
        return password_hash(self._identities.password("", 0)) if self._identities else ""

    async def append(
        self,
        records: Sequence[Record],
        *,
        epoch: int,
        expect: int,
        cursor: str,
        acked: Mapping[str, int],
    ) -> None:
        """Append atomically if `epoch` is the current epoch and the last seq is `expect`; with it
        send the orders, move the intake's cursor ("": not), publish `acked` (source -> source_seq)
        to the agents. O(records). Raises TooLarge, ValueError for a float that is not finite."""
        wires: list[bytes] = []
        sends: list[tuple[int, str, bytes, tuple[bytes, bytes]]] = []
        for place, record in enumerate(records, start=1):
            assert record.seq == expect + place, f"record {record.seq} at {expect + place}"
            assert record.epoch == epoch, f"record of epoch {record.epoch} in {epoch}"
            wires.append(wire := codec.encode_record(record))
            if to := order_nodes(record):
                copy = codec.encode_order_copy(record, wire)
                sends += [
                    (
                        place,
                        node,
                        copy if copy != wire else b"",
                        self._sealed(node, record, epoch, copy),
                    )
                    for node in to
                ]
        if why := size_error([len(wire) for wire in wires], APPEND_BYTES_MAX):
            raise TooLarge(why)
        names = dict.fromkeys(node for _, node, _, _ in sends)
        nodes = {node: index for index, node in enumerate(names, start=1)}
        keys = (*self._keys("log", "epoch", "cursor", "acked", "nodes"), *self._streams(nodes))
        args = (
            *wires,
            *(part for pair in acked.items() for part in pair),
            *(
                part
                for place, node, copy, sealed in sends
                for part in (place, nodes[node], copy, *sealed)
            ),
            *nodes,
        )
        for part in ("log", "rest") if self._policy.replicas_min else ("all",):
            head = (epoch, expect, cursor, len(wires), len(acked), len(sends), part)
            _check_result(
                await self._run(APPEND, keys, (*head, *args), repeatable=False), epoch, expect
            )
            if part == "log":
                await self._replicate()

    async def cursor(self) -> str:
        """The intake's cursor of the last append; "0-0" before the first."""
        (reply,) = await self._ask([("GET", *self._keys("cursor"))])
        return reply.decode() if reply else "0-0"

    def _sealed(self, node: str, order: Record, epoch: int, wire: bytes) -> tuple[bytes, bytes]:
        """The signature of an order for a node, and the keys of stores that come with it."""
        keys = msgspec.msgpack.encode(order_keys(self._keys_of, order, node))
        return sign_order(self._keys_of(node), f"{epoch}-{order.seq}", wire, keys), keys

    async def take(self, *, after: str, num_max: int, wait_s: float) -> Batch:
        """Entries of the intake after `after`, from the lists of the nodes in turn; if there are
        none, wait at most `wait_s`. Without a wait it looks at all lists, else at least once in
        LOOK_AT_ALL_S: whose ring is lost is heard then."""
        num_max = max(1, num_max)
        if wait_s <= 0:
            return await self._take(after, num_max, looks_at_all=True)
        if not self._heard.must_ring(after):
            batch = await self._take(after, num_max)
            if batch.entries:
                return batch
        # 0: without limit. An entry of the shared list that is lost here is sent again.
        limit = f"{max(0.001, wait_s):.3f}"
        woken = await self._block("bell", ("BLPOP", *self._keys("bell", "inbox"), limit), wait_s)
        if not woken:
            return await self._take(after, num_max)
        if woken[0].decode() == self._keys("inbox")[0]:
            return await self._take(after, num_max, woken_by=woken[1])
        return await self._take(after, num_max, rung_by=woken[1][:NAME_BYTES_MAX])

    async def _take(
        self,
        after: str,
        num_max: int,
        *,
        woken_by: bytes = b"",
        rung_by: bytes = b"",
        looks_at_all: bool = False,
    ) -> Batch:
        """`woken_by`: an entry that is taken from the shared list already. `rung_by`: the node of a
        ring that is taken already."""
        heard, now_s = self._heard, time.monotonic()
        looked_s, heard.looked_s = heard.looked_s, -math.inf  # until the reply says what is left
        looks_at_all |= now_s - looked_s >= LOOK_AT_ALL_S
        (prefix,) = self._keys("inbox:")
        bounds = (NODE_NUM_MAX, NODE_BYTES_MAX, REPORT_BYTES_MAX, LIST_NUM_MAX, LIST_BYTES_MAX)
        lists, entries = await self._run(
            TAKE,
            self._keys("bell", "inbox", "reports", "senders"),
            (prefix, after, num_max, *bounds, int(looks_at_all), woken_by, *heard.taken, rung_by),
        )
        heard.looked_s = now_s if looks_at_all else looked_s
        is_end = len(entries) < num_max
        heard.last = (entries[-1][0].decode() if entries else after) if is_end else ""
        looks = [_Look(name.decode(), *numbers) for name, *numbers in lists]
        return Batch(
            entries=tuple(_sent(entry, fields) for entry, fields in entries),
            is_whole=heard.note(looks),
            trimmed={look.node: look.num_dropped for look in looks if look.num_dropped},
        )

    def read_report(self, sent: Sent) -> Report | Rejected:
        """The report of an entry, or why it is none: it never raises."""
        return read_report(self._keys_of, sent)

    async def beats(self, nodes: Sequence[str]) -> list[Heartbeat]:
        """The newest heartbeat of each of these nodes that has sent one since the last call."""
        found: list[Heartbeat] = []
        turn = self._heard.beat_looks = (self._heard.beat_looks + 1) % LOOKS_NUM
        for start in range(0, len(nodes), BEATS_NUM_MAX):
            some = nodes[start : start + BEATS_NUM_MAX]
            (seconds, micros), values = await self._run(
                BEATS,
                self._keys(
                    *(f"beat:{node}" for node in some),
                    *(f"read:{node}" for node in some[turn::LOOKS_NUM]),
                ),
                (BEATS_NUM_KEPT, NODE_KEY_BYTES_MAX, len(some)),
            )
            now_s = int(seconds) + int(micros) / 1e6
            for node, entry, incarnation, spooled in zip(
                some, values[::3], values[1::3], values[2::3], strict=True
            ):
                # An age is never taken twice: the server's clock may be set back.
                if not entry or self._heard.beat_ids.get(node) == entry:
                    continue
                self._heard.beat_ids[node] = entry
                at_s = int(entry.partition(b"-")[0]) / 1e3
                found.append(
                    Heartbeat(
                        node=node,
                        incarnation=incarnation,
                        age_s=max(0.0, now_s - at_s),
                        num_spooled=spooled,
                    )
                )
        return found

    # --- the nodes' users -------------------------------------------------------------------------
    async def check_users(self) -> None:
        """Refuse a server that lets no users be made, or has too few kinds of rights; warn if it
        asks for no password. Raises UsageError, Unavailable."""
        probe = user_name(self._cluster, "?")
        try:
            *_, default = await self._ask(
                [
                    self._user_command("?", "0" * 64),
                    ("ACL", "DELUSER", probe),
                    ("ACL", "GETUSER", "default"),
                ]
            )
        except LogError as error:
            if isinstance(error, Unavailable | Ambiguous):
                raise
            raise UsageError(
                f"the log's server cannot give each agent its own rights: {error}",
                "use Redis 7 or Valkey with all rights, or --shared-password: every "
                "agent then has the server's password",
            ) from None
        if default is not None and b"nopass" in default[1] and b"on" in default[1]:
            _logger.warning(
                "the log's server asks for no password: who reaches it may do anything",
                hint="CONFIG SET requirepass",
            )

    async def admit(self, nodes: Mapping[str, int]) -> None:
        """Read the lists of these nodes (name -> incarnation) from now on. With `identities`, give
        each its user: if that is an earlier incarnation's, the connections of that one end."""
        names = sorted(nodes)
        if names:
            await self._ask([("SADD", *self._keys("senders"), *names)])
        if self._identities is None:
            return
        for start in range(0, len(names), USERS_NUM_MAX):
            some = names[start : start + USERS_NUM_MAX]
            found = await self._ask(
                [("ACL", "GETUSER", user_name(self._cluster, node)) for node in some]
            )
            commands: list[Command] = []
            for node, user in zip(some, found, strict=True):
                known = password_hash(self._identities.password(node, nodes[node]))
                if user is not None and known.encode() not in user[3]:
                    commands.append(("ACL", "DELUSER", user_name(self._cluster, node)))
                commands.append(self._user_command(node, known))
            await self._ask(commands)

    async def expel(self, nodes: Iterable[str]) -> None:
        """Remove the users of these nodes, which ends their connections, and what they have sent
        that is not taken yet."""
        if not (names := list(nodes)):
            return
        if self._identities is not None:
            users = [user_name(self._cluster, node) for node in names]
            await self._ask([("ACL", "DELUSER", *users)])
        lists = self._keys(*(f"inbox:{node}" for node in names))
        await self._ask([("SREM", *self._keys("senders"), *names), ("DEL", *lists)])

    async def num_places(self) -> tuple[int, int]:
        """How many connections the server has, and how many it takes."""
        (text,) = await self._ask([("INFO", "clients")])
        told = dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
        return int(told["connected_clients"]), int(told.get("maxclients", CLIENTS_NUM_MAX))

    async def connections(self) -> dict[str, list[int]]:
        """The server's numbers of each node's connections; what is idle longest comes first."""
        (text,) = await self._ask([("CLIENT", "LIST")])
        user = re.escape(user_name(self._cluster, ""))
        held: dict[str, list[tuple[int, int]]] = {}
        for match in re.finditer(
            rf"^id=(\d+) .* idle=(\d+) .* user={user}(\S+)", text.decode(), re.MULTILINE
        ):
            held.setdefault(match[3], []).append((-int(match[2]), int(match[1])))
        return {node: [number for _, number in sorted(of_node)] for node, of_node in held.items()}

    async def end_connections(self, numbers: Sequence[int]) -> None:
        """End connections by the server's numbers; one that has ended is passed over."""
        for start in range(0, len(numbers), USERS_NUM_MAX):
            some = numbers[start : start + USERS_NUM_MAX]
            await self._ask([("CLIENT", "KILL", "ID", number) for number in some])

    async def is_full(self) -> bool:
        """Whether the server answers, and has no place for a further connection."""
        return await self._link.is_full()

    async def mark_admitted(self) -> None:
        """Note on the server that every node has its user there: see `has_users`."""
        if self._identities is not None:
            await self._ask(
                [
                    (
                        "ACL",
                        "SETUSER",
                        user_name(self._cluster, ""),
                        "reset",
                        "#" + password_hash(self._identities.password("", 0)),
                    )
                ]
            )

    async def has_users(self) -> bool:
        """Whether the server has the users: a restart loses them, a replica never had them. Without
        `identities` there are none, and `admit` only writes again whose lists are read."""
        if self._identities is None:
            return False
        (mark,) = await self._ask([("ACL", "GETUSER", user_name(self._cluster, ""))])
        known = password_hash(self._identities.password("", 0))
        return mark is not None and known.encode() in mark[3]

    def _user_command(self, node: str, known: str) -> Command:
        """The command that gives a node its user, with these rights and no others."""
        own, bell, shared, acked, orders, beat, asked, read = self._keys(
            f"inbox:{node}",
            "bell",
            "inbox",
            "acked",
            f"orders:{node}",
            f"beat:{node}",
            f"asked:{node}",
            f"read:{node}",
        )
        # Each command has its own keys: XADD to a list would make it a stream.
        return (
            "ACL",
            "SETUSER",
            user_name(self._cluster, node),
            "reset",
            "on",
            "#" + known,
            "+select",
            f"(+rpush %W~{own} %W~{bell} %W~{shared})",
            f"(+xadd %W~{beat})",
            f"(+xread %R~{orders})",
            f"(+hget %R~{acked})",
            f"(+blpop ~{asked})",
            f"(+rpush %W~{read})",
        )

    async def rebuild_orders(
        self, open_orders: Sequence[Record], *, epoch: int, acked: Mapping[str, int]
    ) -> None:
        """Rebuild the order streams with ids of this epoch from the open orders of the fold, and
        publish `acked`: after a takeover, or an append that stopped before its orders. Raises
        Fenced."""
        if self._policy.replicas_min:
            await self._replicate()
        (known,) = await self._ask([("SMEMBERS", *self._keys("nodes"))])
        sends = [
            (record, node, codec.encode_order_copy(record, codec.encode_record(record)))
            for record in sorted(open_orders, key=lambda record: record.seq)
            for node in order_nodes(record)
        ]
        used = dict.fromkeys(node for _, node, _ in sends)
        nodes = dict.fromkeys([*used, *sorted(node.decode() for node in known)])
        index = {node: place for place, node in enumerate(nodes, start=1)}
        args = (
            epoch,
            len(sends),
            len(acked),
            *(
                part
                for record, node, wire in sends
                for part in (
                    index[node],
                    record.seq,
                    wire,
                    *self._sealed(node, record, epoch, wire),
                )
            ),
            *(part for pair in acked.items() for part in pair),
            *used,
        )
        keys = (*self._keys("epoch", "acked", "nodes"), *self._streams(nodes))
        _check_result(await self._run(REBUILD_ORDERS, keys, args), epoch, 0)

    async def trim_reports(self, *, before: str) -> None:
        """Delete reports up to and including cursor `before`."""
        high, _, low = before.partition("-")
        await self._ask([("XTRIM", *self._keys("reports"), "MINID", f"{high}-{int(low) + 1}")])

    # --- segments -------------------------------------------------------------------------------
    @property
    def sealed_seq(self) -> int:
        """The last record that is in a segment, as far as this reader knows."""
        return self._segments.last if self._segments is not None else 0

    @property
    def first_seq(self) -> int:
        return self._segments.first if self._segments is not None else 1

    async def open_segments(self) -> SealedLog | None:
        """See ReaderPort: by the head that the server holds. Raises Unavailable as well."""
        if self._folder is not None:
            with _unavailable(self._folder):
                self._segments = await asyncio.to_thread(
                    SealedLog, self._folder, await self._head()
                )
        return self._segments

    async def _head(self) -> str:
        (head,) = await self._ask([("GET", *self._keys("head"))])
        return head.decode() if head else ""

    async def seal(
        self, records: Sequence[Record], *, epoch: int, open_orders: Iterable[int]
    ) -> None:
        """Write the records behind the sealed ones to a segment, then drop all before them from the
        server, and all sealed orders but those in `open_orders` (seqs). Raises Fenced, Conflict,
        OSError. The stream keeps the records of the newest segment."""
        folder, sealed = self._folder, self._segments
        assert folder is not None
        assert sealed is not None, "open_segments comes first"
        last = sealed.chain[-1] if sealed.chain else None
        segment = await asyncio.to_thread(folder.write, records, last)
        (nodes,) = await self._ask([("SMEMBERS", *self._keys("nodes"))])
        keys = (*self._keys("log", "epoch", "head"), *self._streams(map(bytes.decode, nodes)))
        reply = await self._run(
            SEAL,
            keys,
            (
                epoch,
                last.name if last else "",
                segment.name,
                f"{records[0].epoch}-{records[0].seq}",
                f"{epoch}-{segment.last}",
                *open_orders,
            ),
            repeatable=False,
        )
        _check_result(reply, epoch, segment.first - 1)
        now = self._segments or sealed
        if now.last < segment.first:  # else a reader has opened the segments meanwhile
            now.add(segment)

    async def restore(
        self, records: Sequence[Record], segment: Segment, epoch: int, acked: Mapping[str, int]
    ) -> None:
        """Fill an empty server with the newest segment and its records, so that a leader may go on.
        `epoch`: of its last record; `acked`: what is in the log of each source. Raises UsageError
        if the server has a log."""
        if last := await self.last_seq():
            raise UsageError(
                f"the server has a log, up to seq {last}",
                "restore into an empty server: move its folder away first",
            )
        log, epochs, head, known = self._keys("log", "epoch", "head", "acked")
        await self._ask(
            [
                *(
                    ("XADD", log, f"{one.epoch}-{one.seq}", "r", codec.encode_record(one))
                    for one in records
                ),
                ("SET", head, segment.name),
                ("HSET", epochs, "number", epoch),
                *(("HSET", known, source, number) for source, number in acked.items()),
            ],
            repeatable=False,
        )

    # --- readers --------------------------------------------------------------------------------
    async def read(self, *, after: int, num_max: int) -> list[Record]:
        """Records with seq above `after`, also sealed ones; fewer than `num_max` if they are large.
        Raises CorruptLog for a gap."""
        try:
            return await self._read(after, num_max)
        except CorruptLog:
            if self._folder is None:
                raise
            await self.open_segments()  # another control plane may have sealed them meanwhile
            return await self._read(after, num_max)

    async def _read(self, after: int, num_max: int) -> list[Record]:
        if self._segments is not None and after < self._segments.last:
            with _unavailable(self._segments.folder):
                return await asyncio.to_thread(self._segments.read, after=after, num_max=num_max)
        records, num_bytes = list[Record](), 0
        start = await self._start_id(after)
        while start and len(records) < num_max and num_bytes < READ_BYTES_MAX:
            num = min(READ_NUM_MAX, num_max - len(records))
            (entries,) = await self._ask([("XRANGE", *self._keys("log"), start, "+", "COUNT", num)])
            for entry, fields in entries:
                record = codec.record_of_entry(entry.decode(), fields[1], after + len(records) + 1)
                records.append(record)
                num_bytes += len(fields[1])
                start = f"({record.epoch}-{record.seq}"
                self._read_to = (record.seq, record.epoch)
            if len(entries) < num:
                break
        return records

    async def _start_id(self, after: int) -> str:
        """The stream id from which to read the records after seq `after`; "" if there are none."""
        seq, epoch = self._read_to
        if after == seq and epoch:
            return f"({epoch}-{seq}"
        found = await self._run(FIND_SEQ, self._keys("log"), (after + 1,))
        return found.decode() if found else ""

    async def last_seq(self) -> int:
        (top,) = await self._ask([("XREVRANGE", *self._keys("log"), "+", "-", "COUNT", 1)])
        return int(top[0][0].decode().partition("-")[2]) if top else 0

    # --- agents ---------------------------------------------------------------------------------
    async def send(self, reports: Sequence[Report]) -> None:
        """Send reports of one node in order, at least once: on Unavailable or Ambiguous the caller
        retries. Raises ValueError for a float that is not finite."""
        # Lists, because an agent may append to them and can do nothing else with that right. With
        # XADD it could also choose an id above all others.
        for start in range(0, len(reports), SEND_NUM_MAX):
            batch = reports[start : start + SEND_NUM_MAX]
            node = batch[0].source.rpartition("/")[0]
            commands = self._push(node, *map(self.entry, batch))
            await self._ask(commands, repeatable=False)

    def entry(self, report: Report) -> bytes:
        """The signed report, as a list has it. Raises ValueError."""
        node = report.source.rpartition("/")[0]
        return sign_report(self._keys_of(node), codec.encode_report(report))

    async def send_again(self, node: str, entry: bytes) -> None:
        """Put an entry of a node's list back into it, by the leader."""
        await self._ask([("SADD", *self._keys("senders"), node), *self._push(node, entry)])

    def _push(self, node: str, *entries: bytes) -> list[Command]:
        """Append entries to the list of a node, and tell the leader whose list has something."""
        inbox, bell = self._keys(f"inbox:{node}" if self._has_lists else "inbox", "bell")
        return [("RPUSH", inbox, *entries), *[("RPUSH", bell, node)] * self._has_lists]

    async def acked(self, source: str) -> int:
        """The highest source_seq of this source that is in the log, 0 for none."""
        (reply,) = await self._ask([("HGET", *self._keys("acked"), source)])
        return int(reply or 0)

    async def orders(self, node: str, *, after: str, wait_s: float) -> list[SentOrder]:
        """Orders for this node after `after` ("0-0": all open ones), at most ORDERS_NUM_MAX; waits
        at most `wait_s`. An entry without the leader's signature is dropped, with a warning. Raises
        CorruptLog."""
        (key,), deadline_s = self._keys(f"orders:{node}"), time.monotonic() + wait_s
        while True:
            wait_s = max(0.0, deadline_s - time.monotonic())
            # BLOCK 0 would wait without limit.
            block = ("BLOCK", math.ceil(wait_s * 1000)) if wait_s > 0 else ()
            command = ("XREAD", "COUNT", ORDERS_NUM_MAX, *block, "STREAMS", key, after)
            reply = await self._block(f"orders:{node}", command, wait_s)
            entries: list[_Entry] = reply[0][1] if reply else []
            found = [
                SentOrder(
                    record=codec.record_of_entry(
                        entry.decode(), fields[1], read=codec.decode_order_copy
                    ),
                    cursor=entry.decode(),
                    store_keys=from_msgpack(fields[5], StoreKeys),
                )
                for entry, fields in entries
                if self._is_order(node, entry.decode(), fields)
            ]
            if found or not entries:
                return found
            after = entries[-1][0].decode()

    def _is_order(self, node: str, entry: str, fields: Sequence[bytes]) -> bool:
        signed = (
            len(fields) == 6
            and fields[0] == b"r"
            and is_order_signed(self._keys_of(node), entry, fields[1], fields[5], fields[3])
        )
        if not signed and (num := self._forged_orders.due()):
            _logger.warning(
                "skipped an order that is not signed for this node",
                node=node,
                id=entry,
                num_since_last_line=num,
            )
        return signed

    async def beat(self, node: str, incarnation: int, num_spooled: int = 0) -> None:
        """Send a heartbeat, an entry whose id is the server's time. `num_spooled` reports wait."""
        await self._ask(
            [
                (
                    "XADD",
                    *self._keys(f"beat:{node}"),
                    "MAXLEN",
                    BEATS_NUM_KEPT,
                    "*",
                    "i",
                    incarnation,
                    "s",
                    num_spooled,
                )
            ]
        )

    # --- files of a node, read by its agent: not part of the log ---
    async def ask_file(self, node: str, path: str, *, offset: int, wait_s: float) -> FilePart:
        """Let a node's agent read a file from `offset` on. Only one call for a node at a time.
        Raises Unavailable if it does not answer within `wait_s`."""
        return await self._ask_agent(
            node, FileRequest(number=secrets.token_hex(8), path=path, offset=offset), wait_s
        )

    async def check_devices(self, node: str, slots: Iterable[int], *, wait_s: float) -> FilePart:
        """Let a node's agent check the devices of slots; as `ask_file`."""
        return await self._ask_agent(
            node,
            FileRequest(number=secrets.token_hex(8), path="", offset=0, slots=tuple(slots)),
            wait_s,
        )

    async def _ask_agent(self, node: str, request: FileRequest, wait_s: float) -> FilePart:
        asked, read = self._keys(f"asked:{node}", f"read:{node}")
        await self._ask(
            [
                ("DEL", asked, read),
                ("RPUSH", asked, msgspec.msgpack.encode(request)),
                ("PEXPIRE", asked, math.ceil(1e3 * wait_s)),
            ]
        )
        deadline_s = time.monotonic() + wait_s
        while (rest_s := deadline_s - time.monotonic()) > 0:
            found = await self._block(f"read:{node}", ("BLPOP", read, f"{rest_s:.3f}"), rest_s)
            if found is None or len(found[1]) > NODE_KEY_BYTES_MAX:
                continue
            with suppress(msgspec.MsgspecError):  # the node may have sent anything
                if (part := _file_parts.decode(found[1])).number == request.number:
                    return part
        raise Unavailable(f"the agent of {node} does not answer")

    async def file_request(self, node: str, wait_s: float) -> FileRequest | None:
        """The next request for a file of this node; None if none comes within `wait_s`."""
        found = await self._block(
            f"asked:{node}", ("BLPOP", *self._keys(f"asked:{node}"), f"{wait_s:.3f}"), wait_s
        )
        return from_msgpack(found[1], FileRequest) if found else None

    async def send_file(self, node: str, part: FilePart) -> None:
        """Answer a request for a file."""
        await self._ask(
            [("RPUSH", *self._keys(f"read:{node}"), msgspec.msgpack.encode(part))], repeatable=False
        )

    # --- calls ----------------------------------------------------------------------------------
    def _keys(self, *names: str) -> tuple[str, ...]:
        prefix = key_prefix(self._cluster)
        return tuple(prefix + name for name in names)

    def _streams(self, nodes: Iterable[str]) -> tuple[str, ...]:
        return self._keys(*(f"orders:{node}" for node in nodes))

    def _reader(self, name: str) -> _Link:
        """A connection for calls that wait: no other call must queue behind them."""
        if name not in self._readers:
            self._readers[name] = _Link(self._url, self._ca)
        return self._readers[name]

    async def _block(self, name: str, command: Command, wait_s: float) -> Any:
        """The reply to a command that waits on the server at most `wait_s`."""
        link = self._reader(name) if wait_s > 0 else self._link
        return (await self._ask([command], link=link, wait_s=wait_s + REPLY_S_MAX))[0]

    async def _run(
        self,
        script: str,
        keys: Sequence[str],
        args: Sequence[bytes | str | int],
        *,
        repeatable: bool = True,
    ) -> Any:
        rest = (len(keys), *keys, *args)
        try:
            return (await self._ask([("EVALSHA", _digest(script), *rest)], repeatable=repeatable))[
                0
            ]
        except exceptions.NoScriptError:
            return (await self._ask([("EVAL", script, *rest)], repeatable=repeatable))[0]

    async def _ask(
        self,
        commands: Sequence[Command],
        *,
        repeatable: bool = True,
        link: _Link | None = None,
        wait_s: float = REPLY_S_MAX,
    ) -> list[Any]:
        """The replies. Raises Unavailable, Ambiguous, UsageError, LogError, NoScriptError."""
        lost = ""
        for _ in range(TRIES_MAX):
            try:
                replies = await (link or self._link).call(commands, wait_s)
            except _Lost as error:
                lost = str(error)
                if not repeatable:
                    raise Ambiguous(lost) from None
                if error.slow:
                    break
                continue
            for reply in replies:
                if isinstance(reply, exceptions.ResponseError):
                    raise _error_of(reply)
            return replies
        raise Unavailable(lost)


@contextmanager
def _unavailable(folder: Folder) -> Generator[None]:
    """Turn an error of the folder's disk or store into Unavailable: it is tried again."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"{folder.where}: {reason(error)}") from None


def _error_of(refusal: exceptions.ResponseError) -> Exception:
    """The exception for an error reply; the server changed nothing."""
    if isinstance(refusal, exceptions.NoScriptError):
        return refusal
    if isinstance(refusal, TRANSIENT) or str(refusal).startswith(TRANSIENT_CODES):
        return Unavailable(f"the server refuses: {refusal}")
    return LogError(f"the server refuses: {refusal}")


@cache
def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def _check_result(reply: Any, epoch: int, expect: int) -> None:
    result, value = (part.decode() for part in reply)
    if result == "fenced" and int(value) < epoch:
        raise Conflict(f"the server has lost epoch {epoch}: it knows {value}")
    if result == "fenced":
        raise Fenced(f"epoch {epoch} is over: {value} holds the log")
    if result == "conflict":
        raise Conflict(f"the log ends at {value}, expected {expect}")
