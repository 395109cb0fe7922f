"""The HTTP API and the pages over a log that has ended: `unicron view`."""

import asyncio
import secrets
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, cast

from ...events.errors import Pruned
from ...events.log.identity import SECRET_BYTES, Identities
from ...events.log.port import ReaderPort
from ...events.records.envelope import Record
from ..history.timeline import Timeline
from ..service.coordinator import Coordinator
from ..service.tail import Tail
from ..state.cluster import ClusterState
from .address import Address
from .connections import Listener
from .http import HttpApi
from .metrics import Metrics
from .requests import Refusal
from .routes import ROUTES
from .tokens import Tokens

IDLE_S = 10.0
STOP_S_MAX = 0.5


class Recorded:
    """Records in memory: what the API reads of a coordinator and of a log. Nothing is written."""

    leading, leader_url, away = False, "", ""

    def __init__(self, records: Sequence[Record], state: ClusterState, first_seq: int) -> None:
        """`state`: that after the last record."""
        self._records, self._state, self.first_seq = records, state, first_seq
        self.epoch, self.seq, self.now_s = state.epoch, state.seq, state.at_s
        self.followers = list[str]()
        self.old_agents, self.num_dead_letters = set[str](), 0
        self.tail = Tail(cast(ReaderPort, self), kept_num_max=0, idle_s=IDLE_S)

    async def settled(self) -> ClusterState:
        return self._state

    async def find_leader(self) -> NoReturn:
        """Every call that needs a leader is refused."""
        raise Refusal(
            409,
            "this is a log of the past: nothing can be changed",
            "unicron open, for a cluster that runs",
        )

    async def open_segments(self) -> None:
        """It has none."""

    async def read(self, *, after: int, num_max: int) -> Sequence[Record]:
        """As ReaderPort.read. Raises Pruned."""
        if after + 1 < self.first_seq:
            raise Pruned(self.first_seq)
        begin = after + 1 - self.first_seq
        return self._records[begin : begin + num_max]


async def serve(
    records: Sequence[Record],
    timeline: Timeline,
    state: ClusterState,
    *,
    cluster: str,
    file: str,
    port: int,
    told: Callable[[str], None],
) -> None:
    """Serve the log on loopback until a signal; `told` gets the URL. Raises OSError."""
    log = Recorded(records, state, timeline.first_seq)
    tokens = Tokens(Path("/nonexistent"), owner=secrets.token_hex())
    api = HttpApi(
        [one for one in ROUTES if one.path != "/metrics"],
        cast(Coordinator, log),
        cast(ReaderPort, log),
        tokens=tokens,
        address=Address(redis_url="", cluster=cluster),
        identities=Identities(secrets.token_bytes(SECRET_BYTES), cluster),
        metrics=Metrics(),
        timeline=timeline,
        file=file,
    )
    listener, stop = Listener(api.app(), stop_s_max=STOP_S_MAX), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    bound_port = await listener.start("127.0.0.1", port)
    try:
        code, _ = api.sessions.code(tokens.all()[0], "operate")
        told(f"http://127.0.0.1:{bound_port}/#code={code}")
        await stop.wait()
    finally:
        await listener.stop()
