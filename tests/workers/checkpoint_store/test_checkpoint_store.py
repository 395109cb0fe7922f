"""The checkpoint store: bounded memory, the transfer protocol, and its process under an agent."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
from agent_driver import new_shim
from checkpoint_stores import (
    KEY,
    SECRET,
    TASK,
    WAIT_S,
    LocalKeeper,
    alter,
    get,
    keep,
    key_for,
    offer,
    offered,
    put,
    request,
    steps,
    wait,
)
from checkpoint_stores import stored as stored_share
from structlog.testing import capture_logs
from unicron.events import network_address
from unicron.events.errors import UsageError
from unicron.events.log.identity import StoreKey, store_key, store_secret
from unicron.workers.agent import checkpoint_store as agents_keeper
from unicron.workers.agent.checkpoint_store import CheckpointStore as StoreProcess
from unicron.workers.agent.delivery.log_link import BACKOFF_S_MIN
from unicron.workers.checkpoint_store import protocol, store
from unicron.workers.checkpoint_store.protocol import (
    Checksum,
    Go,
    Offer,
    TransferError,
)
from unicron.workers.checkpoint_store.server import CONNECTIONS_NUM_MAX, WHO_NUM_MAX, FailureLog
from unicron.workers.checkpoint_store.store import (
    BYTES_MAX,
    ENDED_NUM_MAX,
    CheckpointStore,
    StoreRefused,
    bytes_max,
)
from unicron.workers.host import linux

GUESSED = StoreKey(TASK, 1, b"guessed")


def propose(endpoint: str, one: Offer) -> None:
    """Offer a share; raises TransferError if it is refused."""
    with protocol.connect(endpoint, key_for(one)) as connection:
        protocol.send(connection, one)
        protocol.receive(connection, Go)


def test_the_two_newest_versions_of_a_share_are_kept() -> None:
    shelf = CheckpointStore(10_000, lambda task: None)
    for step in (10, 20, 30):
        keep(shelf, offer(step, num_shares=2))
        keep(shelf, offer(step, share=1, num_shares=2))
        keep(shelf, offer(step + 1, task=8))
    assert (steps(shelf), steps(shelf, share=1), steps(shelf, 8)) == ([20, 30], [20, 30], [21, 31])
    assert shelf.used_bytes == 600
    found = shelf.find(request(20, share=1, num_shares=2))
    assert found is not None
    assert (found.offer.step_version, found.offer.share) == (20, 1)
    assert shelf.find(request(20, num_shares=1)) is None, "another number of shares"
    assert shelf.find(request(10, num_shares=2)) is None
    assert shelf.find(request(20, generation=2, num_shares=2)) is None
    shelf.forget(TASK)
    assert (steps(shelf), steps(shelf, 8), shelf.used_bytes) == ([], [21, 31], 200)


def test_the_newest_whole_version_is_kept_when_newer_ones_are_not_whole() -> None:
    """A member whose shares of later steps were refused has only that of step 10."""
    shelf = CheckpointStore(10_000, lambda task: None)
    keep(shelf, offer(10))
    for step in (20, 30, 40):
        keep(shelf, offer(step, whole=(1, 10)))
        assert steps(shelf) == [10, step]
    keep(shelf, offer(50, whole=(1, 40)))
    assert steps(shelf) == [40, 50]


def test_all_shares_older_than_a_whole_version_are_removed() -> None:
    """Share 3 is of an earlier layout, and no newer share replaces it."""
    shelf = CheckpointStore(10_000, lambda task: None)
    keep(shelf, offer(10, share=3, num_shares=4))
    keep(shelf, offer(20, generation=2))
    assert steps(shelf, share=3) == [10]
    keep(shelf, offer(30, generation=2, whole=(2, 20)))
    assert (steps(shelf), steps(shelf, share=3)) == ([20, 30], [])


def test_a_share_that_is_sent_again_replaces_the_first() -> None:
    shelf = CheckpointStore(10_000, lambda task: None)
    for step in (10, 20, 20):
        keep(shelf, offer(step))
    assert steps(shelf) == [10, 20]


def test_the_budget_of_an_offer_bounds_the_store() -> None:
    shelf = CheckpointStore(10_000, lambda task: None)
    keep(shelf, offer(10))
    small = msgspec.structs.replace(offer(10, task=8), bytes_max=150)
    with pytest.raises(StoreRefused, match="does not fit beside the 100 of 150 in use"):
        shelf.reserve(small)
    with pytest.raises(StoreRefused, match="share 2 of 2"):
        shelf.reserve(offer(20, share=2, num_shares=2))


def test_superseded_checkpoints_are_evicted_first() -> None:
    lost: list[int] = []
    stored = CheckpointStore(450, lost.append)
    keep(stored, offer(10))
    keep(stored, offer(10, task=8))
    keep(stored, offer(20, task=8))
    keep(stored, offer(20))
    keep(stored, offer(30))  # evicts the oldest checkpoint whose task has a newer one
    assert (steps(stored), steps(stored, 8)) == ([20, 30], [10, 20])
    keep(stored, offer(5, task=9, size=250))
    assert [steps(stored, task) for task in (TASK, 8, 9)] == [[30], [20], [5]]
    with pytest.raises(StoreRefused, match="does not fit beside the 450 of 450 in use"):
        stored.reserve(offer(1, task=10))
    with pytest.raises(StoreRefused, match="share of 451 bytes does not fit into 450"):
        stored.reserve(offer(40, size=451))
    assert [steps(stored, task) for task in (TASK, 8, 9)] == [[30], [20], [5]], "none is evicted"
    assert lost == []


def test_a_refused_checkpoint_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []
    stored = CheckpointStore(400, lost.append)
    for task in (TASK, 8):
        keep(stored, offer(10, task=task))
        keep(stored, offer(20, task=task))
    with pytest.raises(StoreRefused, match="share of 301 bytes does not fit beside the 400"):
        stored.reserve(offer(1, task=9, size=301))
    with pytest.raises(StoreRefused, match="share of 350 bytes does not fit beside the 400"):
        stored.reserve(offer(30, size=350))
    monkeypatch.setattr("unicron.workers.checkpoint_store.store.mmap.mmap", _no_memory)
    with pytest.raises(StoreRefused, match="no memory for 100 bytes"):
        stored.reserve(offer(30))
    assert (steps(stored), steps(stored, 8), lost) == ([10, 20], [10, 20], [])


def _no_memory(*args: int, flags: int) -> mmap.mmap:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_task_may_replace_its_only_checkpoint_and_its_loss_is_reported() -> None:
    lost: list[int] = []
    stored = CheckpointStore(150, lost.append)
    keep(stored, offer(10))
    keep(stored, offer(20))
    assert (steps(stored), lost) == ([20], [])
    broken = offer(30)
    stored.cancel(broken, stored.reserve(broken))
    assert (steps(stored), lost, stored.used_bytes) == ([], [TASK], 0)
    stored.cancel(broken, stored.reserve(broken))
    assert lost == [TASK], "no checkpoint was left to lose"


def test_an_offer_of_an_old_generation_is_refused() -> None:
    stored = CheckpointStore(1000, lambda task: None)
    keep(stored, offer(10, generation=3))
    with pytest.raises(StoreRefused, match="generation 2 of task 7 is over"):
        stored.reserve(offer(50, generation=2))
    keep(stored, offer(8, generation=4))  # an older step, but a newer generation
    assert steps(stored) == [10, 8]


def test_a_checkpoint_that_arrives_after_its_task_ended_is_refused() -> None:
    stored = CheckpointStore(1000, lambda task: None)
    one = offer(10)
    memory = stored.reserve(one)
    stored.forget(TASK)
    assert stored.used_bytes == 0
    with pytest.raises(StoreRefused, match="task 7 has ended"):
        stored.add(stored_share(one, memory))
    stored.cancel(one, memory)
    assert (steps(stored), stored.used_bytes) == ([], 0)
    with pytest.raises(StoreRefused, match="task 7 has ended"):
        stored.reserve(offer(20))
    for task in range(10_000, 10_000 + ENDED_NUM_MAX):
        stored.forget(task)
    stored.reserve(offer(20))  # the store remembers only the last ENDED_NUM_MAX ended tasks


@pytest.mark.parametrize(
    ("newer", "why"),
    [
        (offer(8, generation=2), "generation 1 of task 7 is over"),
        (offer(30), "task 7 has a newer checkpoint than generation 1 step 20"),
    ],
)
def test_a_checkpoint_that_was_overtaken_is_refused(newer: Offer, why: str) -> None:
    stored = CheckpointStore(1000, lambda task: None)
    keep(stored, offer(10))
    late = offer(20)
    memory = stored.reserve(late)
    keep(stored, newer)
    with pytest.raises(StoreRefused, match=why):
        stored.add(stored_share(late, memory))
    stored.cancel(late, memory)
    assert (steps(stored), stored.used_bytes) == ([10, newer.step_version], 200)


def test_a_loss_is_reported_if_the_previous_transfer_ends_later() -> None:
    lost: list[int] = []
    stored = CheckpointStore(150, lost.append)
    one, two = offer(10), offer(20)
    memory = stored.reserve(one)
    stored.add(stored_share(one, memory))
    after = stored.reserve(two)  # before the transfer of the first one has ended
    stored.cancel(one, memory)
    assert lost == []
    stored.cancel(two, after)
    assert lost == [TASK]


# --- how much memory the store may use -----------------------------------------------------------
def test_the_memory_for_checkpoints_can_be_set() -> None:
    assert bytes_max({BYTES_MAX: "123"}) == 123
    with pytest.raises(UsageError, match="UNICRON_COPIES_BYTES_MAX is '4GB'"):
        bytes_max({BYTES_MAX: "4GB"})
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    total = re.search(r"MemTotal: +(\d+)", text)
    assert total is not None
    assert 0 < bytes_max({}) < int(total[1]) * 1024 / 2


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/", {}, 8_000_000 * 1024),
        (
            "0::/a/b",
            {
                "a/b/memory.max": "max",
                "a/b/memory.current": "10",
                "a/memory.max": "9000",
                "a/memory.current": "8000",
            },
            1000,
        ),
        (
            "0::/of/the/host",
            {
                "memory.max": "9000",
                "memory.current": "8000",
                "memory.stat": "anon 500\ninactive_file 100\nactive_file 20",
            },
            1120,
        ),
        ("0::/a", {"a/memory.max": "7000", "a/memory.current": "7100"}, 0),
        (
            "4:cpu,memory:/a",
            {
                "memory/a/memory.limit_in_bytes": "9000",
                "memory/a/memory.usage_in_bytes": "8000",
                "memory/a/memory.stat": "total_inactive_file 5\ninactive_file 1",
            },
            1005,
        ),
        (
            "4:memory:/a\n0::/",
            {
                "memory/memory.limit_in_bytes": str((1 << 63) - 4096),
                "memory/memory.usage_in_bytes": "8000",
            },
            8_000_000 * 1024,
        ),
    ],
)
def test_available_memory_is_what_the_cgroup_has_left(
    tmp_path: Path, line: str, files: dict[str, str], expected: int
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    contents = {
        proc / "self" / "cgroup": f"{line}\n",
        proc / "meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n",
    }
    for name, text in files.items():
        contents.setdefault((cgroups / name).with_name("memory.stat"), "anon 1")
        contents[cgroups / name] = text
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert store.available_bytes(proc, cgroups) == expected


# --- the protocol --------------------------------------------------------------------------------
@pytest.fixture
def keeper() -> Iterator[LocalKeeper]:
    made = LocalKeeper("n1")
    yield made
    made.close()


def data() -> list[bytes]:
    """Pieces that need several chunks and several socket writes."""
    size = 3_000_001
    return [bytes(range(256)) * (size // 256) + bytes(size % 256), b"x", bytes(70_000)]


def test_get_returns_the_pieces_that_were_put(keeper: LocalKeeper) -> None:
    sent = data()
    checksum, _ = put(keeper.keeper.endpoint, 10, sent)
    (kept,) = keeper.stored(TASK)
    assert checksum == kept.checksum
    assert re.fullmatch("crc32:[0-9a-f]{8}", checksum)
    assert get(keeper.keeper.endpoint, request(10)) == sent
    assert get(keeper.keeper.endpoint, request(10), [2, 0]) == [sent[2], sent[0]]
    with protocol.connect(keeper.keeper.endpoint, KEY) as connection:
        assert protocol.list_shares(connection, TASK) == (kept.offer,)


def test_a_piece_altered_in_memory_is_detected_and_the_others_are_good(keeper: LocalKeeper) -> None:
    sent = data()
    put(keeper.keeper.endpoint, 10, sent)
    alter(keeper.stored(TASK)[0])
    with pytest.raises(TransferError, match="checkpoint altered: t0"):
        get(keeper.keeper.endpoint, request(10))
    assert get(keeper.keeper.endpoint, request(10), [1, 2]) == sent[1:]
    keeper.stored(TASK)[0].memory[5] ^= 1
    with pytest.raises(TransferError, match=r"altered|invalid manifest"):
        get(keeper.keeper.endpoint, request(10), [1])


def test_a_share_altered_in_transit_is_refused(keeper: LocalKeeper) -> None:
    sent = [b"abc", b"defg"]
    put(keeper.keeper.endpoint, 10, sent)
    one, manifest = offered(20, sent)
    sums = protocol.encode_sums(map(zlib.crc32, sent))
    with protocol.connect(keeper.keeper.endpoint, KEY) as connection:
        protocol.send(connection, one)
        protocol.receive(connection, Go)
        connection.sendall(manifest + b"abc" + b"dexg" + sums)
        protocol.send(connection, Checksum(checksum=protocol.checksum_of(manifest, sums)))
        with pytest.raises(TransferError, match="checkpoint altered: received crc32"):
            protocol.receive(connection, protocol.StoredReply)
    assert steps(keeper.shelf) == [10]
    assert keeper.shelf.used_bytes == one.copy_bytes


def test_a_manifest_that_does_not_match_the_bytes_is_refused(keeper: LocalKeeper) -> None:
    one, manifest = offered(20, [b"abc"])
    longer = msgspec.structs.replace(one, copy_bytes=one.copy_bytes + 1)
    for wrong, text in ((manifest, longer), (b"x" * len(manifest), one)):
        with protocol.connect(keeper.keeper.endpoint, KEY) as connection:
            protocol.send(connection, text)
            protocol.receive(connection, Go)
            connection.sendall(wrong)
            assert connection.recv(1) == b"", "the store closes the connection"
    wait(lambda: keeper.shelf.used_bytes == 0, "nothing is kept")


def test_a_checkpoint_that_comes_too_late_is_refused(keeper: LocalKeeper) -> None:
    one, manifest = offered(10, [bytes(100)])
    with protocol.connect(keeper.keeper.endpoint, KEY) as connection:
        sender = protocol.ShareSender(connection, one, manifest)
        put(keeper.keeper.endpoint, 8, [bytes(100)], generation=2)
        sender.send(memoryview(bytes(100)))
        with pytest.raises(TransferError, match="generation 1 of task 7 is over"):
            sender.finish()
    assert steps(keeper.shelf) == [8]


def test_a_partial_transfer_is_discarded(keeper: LocalKeeper) -> None:
    sent = data()
    one, manifest = offered(10, sent)
    with protocol.connect(keeper.keeper.endpoint, KEY) as connection:
        sender = protocol.ShareSender(connection, one, manifest)
        sender.send(memoryview(sent[0]))
        assert keeper.shelf.used_bytes == one.copy_bytes
    wait(lambda: keeper.shelf.used_bytes == 0, "the half is gone")
    with pytest.raises(TransferError, match="no share 0 of task 7"):
        get(keeper.keeper.endpoint, request(10))


def test_a_request_for_a_missing_piece_closes_the_connection(keeper: LocalKeeper) -> None:
    put(keeper.keeper.endpoint, 10, [b"abc"])
    with protocol.connect(keeper.keeper.endpoint, KEY) as connection:
        protocol.ShareReader(connection, request(10))
        protocol.send(connection, protocol.PiecesRequest(indices=(1,)))
        assert connection.recv(1) == b""


def test_a_client_without_the_secret_is_refused(keeper: LocalKeeper) -> None:
    with pytest.raises(TransferError, match="not the key of task 7, or the control plane's secret"):
        put(keeper.keeper.endpoint, 10, [bytes(100)], GUESSED)
    with pytest.raises(TransferError, match="no order has a key of the store"):
        protocol.connect(keeper.keeper.endpoint, None)
    with socket.create_connection(("127.0.0.1", keeper.listener.getsockname()[1])) as connection:
        protocol.receive(connection, protocol.Greeting)
        protocol.send(connection, offer(10))  # without a proof
        connection.settimeout(WAIT_S)
        assert connection.recv(1) == b""
    assert steps(keeper.shelf) == []


def test_a_store_without_the_secret_gets_no_state() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    received: list[protocol.Message] = []
    more: list[bytes] = []

    def play() -> None:
        connection, _ = listener.accept()
        with connection:
            protocol.send(connection, protocol.Greeting(nonce=bytes(32)))
            received.append(protocol.receive(connection, protocol.Claim))
            protocol.send(connection, protocol.Proof(answer=bytes(32)))
            connection.settimeout(WAIT_S)
            more.append(connection.recv(1))

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    with listener, pytest.raises(TransferError, match="does not know the key of task 7"):
        put(f"127.0.0.1:{listener.getsockname()[1]}", 10, [bytes(100)])
    thread.join(WAIT_S)
    assert more == [b""], "data was sent after the wrong proof"
    assert KEY.key not in received[0].answer  # type: ignore[attr-defined]


def test_malformed_input_closes_the_connection(keeper: LocalKeeper) -> None:
    for nonsense in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", keeper.listener.getsockname()[1])) as one:
            protocol.receive(one, protocol.Greeting)
            one.settimeout(WAIT_S)
            try:
                one.sendall(nonsense)
                one.shutdown(socket.SHUT_WR)
                assert one.recv(100) == b""
            except TimeoutError:
                raise
            except OSError:  # the store has already closed the connection
                pass
    put(keeper.keeper.endpoint, 10, [bytes(100)])
    assert steps(keeper.shelf) == [10]


def test_idle_connections_without_the_secret_are_closed(keeper: LocalKeeper) -> None:
    at = ("127.0.0.1", keeper.listener.getsockname()[1])
    strangers = [socket.create_connection(at) for _ in range(CONNECTIONS_NUM_MAX)]
    done = threading.Event()

    def drip() -> None:
        while not done.wait(0.3):
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.send(b"\x00")

    for stranger in strangers:
        stranger.sendall((60_000).to_bytes(4, "big"))
    thread = threading.Thread(target=drip)
    thread.start()
    try:
        put(keeper.keeper.endpoint, 10, [bytes(100)])
    finally:
        done.set()
        thread.join()
        for stranger in strangers:
            stranger.close()
    assert steps(keeper.shelf) == [10]


def test_a_rank_reaches_the_shares_of_its_own_task_only(keeper: LocalKeeper) -> None:
    endpoint, foreign = keeper.keeper.endpoint, store_key(SECRET, 8, 1)
    put(endpoint, 10, [b"state of task 7"])
    with pytest.raises(TransferError, match="the key of task 8, not of 7"):
        put(endpoint, 20, [b"replaced"], foreign)
    for wish in (protocol.ListRequest(task=TASK), request(10)):
        with protocol.connect(endpoint, foreign) as connection:
            protocol.send(connection, wish)
            with pytest.raises(TransferError, match="the key of task 8, not of 7"):
                protocol.receive(connection, protocol.List, Offer)
    for claimed in (
        msgspec.structs.replace(foreign, task=TASK),  # the key of another task
        msgspec.structs.replace(KEY, generation=2),
    ):  # and of another generation
        with pytest.raises(TransferError, match="not the key of task 7"):
            put(endpoint, 20, [b"replaced"], claimed)
    assert get(endpoint, request(10)) == [b"state of task 7"]
    assert steps(keeper.shelf) == [10]


def test_a_rank_cannot_claim_a_future_generation(keeper: LocalKeeper) -> None:
    endpoint = keeper.keeper.endpoint
    for changes in ({"generation": 10**9}, {"generation": 2}, {"whole": (10**9, 1)}):
        with pytest.raises(TransferError, match="the key of generation 1, not of"):
            put(endpoint, 10, [b"x"], KEY, **changes)
    put(endpoint, 10, [b"x"])
    put(endpoint, 20, [b"x"], store_key(SECRET, TASK, 2))  # one of before, on its way
    put(endpoint, 30, [b"x"], generation=2)
    assert steps(keeper.shelf) == [20, 30]
    restarts = store_key(SECRET, TASK, 0)
    put(endpoint, 40, [b"x"], restarts, generation=3)
    assert steps(keeper.shelf)[-1] == 40


def test_keys_are_of_a_node_a_task_and_a_generation() -> None:
    found = {
        store_key(store_secret(node), task, generation).key
        for node in (b"a", b"b")
        for task in (1, 11)
        for generation in (1, 11)
    }
    assert len(found) == 8


# --- the process, as an agent starts and ends it -------------------------------------------------
class Losses(list[tuple[int, str]]):
    """(task, reason) of each loss that the store process reports to its agent."""

    def hear(self, task: int, why: str) -> None:
        self.append((task, why))


@asynccontextmanager
async def store_process(tmp_path: Path, losses: Losses, **env: str) -> AsyncIterator[StoreProcess]:
    shim = new_shim(tmp_path)
    keeper = StoreProcess(
        "127.0.0.1",
        SECRET,
        {**os.environ, **env},
        ("UNICRON_PROCESS", "test:n1/1:keeper"),
        tmp_path / "keeper.log",
        losses.hear,
        start=5,
        shim=shim,
    )
    try:
        yield keeper
    finally:
        keeper.close()
        shim.end()


async def until(look: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.01)


async def test_the_store_starts_on_demand_and_restarts_on_the_same_port(tmp_path: Path) -> None:
    losses = Losses()
    async with store_process(tmp_path, losses, UNICRON_COPIES_BYTES_MAX="1000") as keeper:
        endpoint = keeper.endpoint
        assert keeper.pid == 0
        assert (await asyncio.to_thread(put, endpoint, 10, [bytes(100)]))[1] == 5
        first = keeper.pid
        score = Path(f"/proc/{first}/oom_score_adj").read_text(encoding="ascii")
        assert int(score) == 1000, "the OOM killer takes the store first"
        assert await asyncio.to_thread(get, endpoint, request(10)) == [bytes(100)]
        with pytest.raises(TransferError, match="share of 1001 bytes does not fit into"):
            await asyncio.to_thread(propose, endpoint, offer(20, size=1001))
        os.kill(first, signal.SIGKILL)
        await until(lambda: losses, "the exit is reported")
        assert losses == [(0, "the checkpoint store has exited")]
        assert (await asyncio.to_thread(put, endpoint, 30, [bytes(100)]))[1] == 6
        assert keeper.pid not in (0, first)
        assert await asyncio.to_thread(get, endpoint, request(30)) == [bytes(100)]
        keeper.forget(TASK)
        await until(lambda: _nothing(endpoint), "the task is forgotten")
        last = keeper.pid
    assert linux.read(last) is None or linux.read(last).state == "Z"  # type: ignore[union-attr]
    assert losses == [(0, "the checkpoint store has exited")], "close reports no loss"
    with pytest.raises(ConnectionRefusedError):
        put(endpoint, 40, [bytes(100)])
    assert "refused: share of 1001 bytes" in (tmp_path / "keeper.log").read_text()


def _nothing(endpoint: str) -> bool:
    try:
        get(endpoint, request(30))
    except TransferError:
        return True
    return False


async def test_restarts_of_a_store_that_exits_at_once_back_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        agents_keeper, "ARGV", (sys.executable, "-c", "raise SystemExit('it cannot start')")
    )
    log = tmp_path / "keeper.log"
    losses = Losses()
    with capture_logs() as logs:
        async with store_process(tmp_path, losses) as keeper:
            host, _, port = keeper.endpoint.rpartition(":")
            with socket.create_connection((host, int(port))):
                await until(lambda: len(logs) >= 10, "the store exits five times")
    assert log.read_text().count("it cannot start") >= 5
    assert losses == []
    assert keeper.start == 5, "an early exit uses up no store number"
    for num, one in enumerate([one for one in logs if "again_s" in one][:5]):
        assert one["event"] == "the checkpoint store has exited before it held a checkpoint"
        assert BACKOFF_S_MIN * 2**num / 2 <= one["again_s"] <= BACKOFF_S_MIN * 2**num


async def test_an_agent_starts_no_more_stores_than_it_has_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_keeper, "STORES_NUM_MAX", 2)
    losses = Losses()
    async with store_process(tmp_path, losses) as keeper:
        for start in (5, 6):
            losses.clear()
            sent = await asyncio.to_thread(put, keeper.endpoint, 10, [bytes(100)])
            assert sent[1] == start
            os.kill(keeper.pid, signal.SIGKILL)
            await until(lambda: losses, "the exit is reported")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(put, keeper.endpoint, 20, [bytes(100)])
        assert keeper.pid == 0


async def test_an_agent_that_cannot_start_a_store_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = socket.socketpair

    def none_is_left(*args: int) -> NoReturn:
        monkeypatch.setattr(socket, "socketpair", pair)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with store_process(tmp_path, Losses()) as keeper:
        with capture_logs() as logs:
            monkeypatch.setattr(socket, "socketpair", none_is_left)
            await asyncio.to_thread(put, keeper.endpoint, 10, [bytes(100)])
    assert [one["event"] for one in logs] == [
        "the checkpoint store cannot start",
        "started the checkpoint store",
    ]


async def test_a_lost_checkpoint_is_reported_with_its_task(tmp_path: Path) -> None:
    losses = Losses()
    async with store_process(tmp_path, losses, UNICRON_COPIES_BYTES_MAX="150") as keeper:
        await asyncio.to_thread(put, keeper.endpoint, 10, [bytes(100)])
        connection = await asyncio.to_thread(protocol.connect, keeper.endpoint, KEY)
        with connection:
            protocol.send(connection, offer(20))
            await asyncio.to_thread(protocol.receive, connection, Go)
        await until(lambda: losses, "the loss is reported")
        assert [task for task, _ in losses] == [TASK]


def test_repeated_failures_are_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "keeper.log"

    async def live() -> None:
        async with store_process(tmp_path, Losses(), UNICRON_COPIES_BYTES_MAX="1000") as keeper:
            for size in (1001, 1002, 1003):
                with pytest.raises(TransferError, match=f"share of {size} bytes does not"):
                    await asyncio.to_thread(propose, keeper.endpoint, offer(10, size=size))
            for _ in range(3):
                with pytest.raises(TransferError, match="not the key"):
                    await asyncio.to_thread(put, keeper.endpoint, 10, [], GUESSED)
            await asyncio.to_thread(put, keeper.endpoint, 20, [bytes(100)])
            await until(lambda: path.read_text().count("recovered") == 2, "both are logged")

    asyncio.run(live())
    assert sorted(path.read_text().splitlines()) == [
        "127.0.0.1: connection failed: client without a key",
        "127.0.0.1: recovered",
        "memory for checkpoints: 1000 bytes",
        "task 7: recovered",
        "task 7: refused: share of 1001 bytes does not fit into 1000",
    ]


def said_by_strangers(chance: random.Random) -> Iterator[bytes]:
    """Without the key: what cannot be decoded, numbers beyond all bounds, long text, any bytes."""
    for number in (2**64 - 1, -(2**63), 2**63, 0):
        claim = protocol.Claim(task=number, generation=number, nonce=b"", answer=b"")
        yield msgspec.msgpack.encode(claim)
    yield msgspec.msgpack.encode(protocol.Refused(why="\n\x1b[2J" * 20_000))
    yield b"\x82\xa4type\xa7Refused\xa3why\xa3\xff\xff\xff"
    yield b"\x82\xa4type\xa7Refused\xa3why" + b"\x91" * 100_000
    for _ in range(100):
        yield chance.randbytes(chance.randrange(60))


def test_strangers_do_not_fill_the_log(tmp_path: Path) -> None:
    path, chance = tmp_path / "keeper.log", random.Random(11)

    async def live() -> None:
        async with store_process(tmp_path, Losses()) as keeper:
            await asyncio.to_thread(put, keeper.endpoint, 10, [bytes(100)])
            pid = keeper.pid
            for number, said in enumerate(said_by_strangers(chance)):
                await asyncio.to_thread(say, keeper.endpoint, said)
                # The address is good again.
                await asyncio.to_thread(put, keeper.endpoint, 11 + number, [bytes(100)])
            assert keeper.pid == pid

    asyncio.run(live())
    text = path.read_text()
    assert len(text) < 1_000, text
    assert "connection failed: " in text
    assert "Traceback" not in text


def say(endpoint: str, message: bytes) -> None:
    """Send one message without a key, and wait until the store closes the connection."""
    with socket.create_connection(network_address.split_endpoint(endpoint)) as one:
        protocol.receive(one, protocol.Greeting)
        one.settimeout(WAIT_S)
        with contextlib.suppress(ConnectionError):
            one.sendall(len(message).to_bytes(4, "big") + message)
            one.shutdown(socket.SHUT_WR)
            while one.recv(1 << 16):
                pass


def test_failures_of_many_addresses_are_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    failures = FailureLog()
    for number in range(3 * WHO_NUM_MAX):
        for _ in range(3):
            failures.failed(f"host {number}", "w" * 5_000)
            failures.succeeded(f"host {number}")
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 * (WHO_NUM_MAX + 1)
    assert max(map(len, lines)) <= 310


async def test_a_store_without_descriptors_waits_and_continues(tmp_path: Path) -> None:
    async with store_process(tmp_path, Losses()) as keeper:
        await asyncio.to_thread(put, keeper.endpoint, 10, [bytes(100)])
        limits = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        host, _, port = keeper.endpoint.rpartition(":")
        with socket.create_connection((host, int(port))):
            await until(lambda: "accept: " in (tmp_path / "keeper.log").read_text(), "logged")
            begin = _ticks(keeper.pid)
            await asyncio.sleep(1.0)
            assert _ticks(keeper.pid) - begin <= 5, "the store busy-waits"
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, limits)
        await asyncio.to_thread(put, keeper.endpoint, 20, [bytes(100)])
    assert (tmp_path / "keeper.log").read_text().count("accept: ") == 2, "logged at start and end"


def _ticks(pid: int) -> int:
    """CPU time of the process, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_a_store_whose_socket_is_closed_exits(tmp_path: Path) -> None:
    losses = Losses()
    async with store_process(tmp_path, losses) as keeper:
        await asyncio.to_thread(put, keeper.endpoint, 10, [bytes(100)])
        _shut(keeper.endpoint)
        await until(lambda: losses, "the exit is reported")
    assert "the socket is closed" in (tmp_path / "keeper.log").read_text()


def _shut(endpoint: str) -> None:
    """Shut down the store's listening socket. This process holds a descriptor of it."""
    host, _, port = endpoint.rpartition(":")
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket
            continue
        with one:
            if one.family == socket.AF_INET and one.getsockname() == (host, int(port)):
                one.shutdown(socket.SHUT_RDWR)
                return
    raise AssertionError(f"no socket listens on {endpoint}")


def test_the_store_exits_with_its_shim(tmp_path: Path) -> None:
    read, write = os.pipe()
    agent = os.fork()
    if agent == 0:

        async def live() -> None:
            async with store_process(tmp_path, Losses()) as keeper:
                await asyncio.to_thread(put, keeper.endpoint, 10, [bytes(100)])
                os.write(write, b"%d\n" % keeper.pid)
                proc = linux.read(keeper.pid)
                assert proc is not None
                os.kill(proc.ppid, signal.SIGKILL)
                await asyncio.sleep(WAIT_S)

        try:
            asyncio.run(live())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        pid = int(pipe.readline())
    wait(lambda: (proc := linux.read(pid)) is None or proc.state == "Z", "the keeper has ended")
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
