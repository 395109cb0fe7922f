"""Probes of other nodes, by order of the leader; and the port at which this node answers them."""

import asyncio
import socket
import time
from collections.abc import Sequence

import structlog

from ...events import node_probe
from ...events.log.identity import StoreKeys
from ...events.log.port import SentOrder
from ...events.node_probe import PORT_FIRST, PORTS_NUM, PROBE_S_MAX, SEND_S, SENDS_NUM_MAX
from ...events.object_storage import reason
from ...events.records.envelope import Record
from ...events.records.orders import ProbeNode
from ...events.records.reports import NodeProbed
from ..host.probe_port import Rate
from .delivery.outbox import Put
from .processes.shim import PROBES, Shim

NO_PORT = 0
_log = structlog.get_logger("agent")


class Prober:
    """Probes other nodes for the agent of `node`, each probe in a task of `group`."""

    def __init__(self, node: str, incarnation: int, report: Put, group: asyncio.TaskGroup) -> None:
        self._node, self._incarnation = node, incarnation
        self._report, self._group = report, group
        self._rate = Rate(node_probe.RATE_NUM_MAX)

    def execute(self, sent: SentOrder, order: ProbeNode) -> None:
        """Carry out an order if it is for this incarnation, and report the answer."""

        async def probe() -> None:
            self._report(await self.probe(order, sent.record, sent.store_keys), None)

        if self.is_asked(order):
            self._group.create_task(probe(), name=f"probe {sent.record.seq}")

    def is_asked(self, order: ProbeNode) -> bool:
        """Whether the order is for this incarnation: later ones read it too."""
        return (self._node, self._incarnation) in zip(order.nodes, order.incarnations, strict=False)

    async def probe(self, order: ProbeNode, record: Record, keys: StoreKeys) -> NodeProbed:
        """Carry out an order. Takes PROBE_S_MAX if no proof comes."""
        proof, error = b"", ""
        if not self._rate.takes(time.monotonic()):
            error = f"more than {node_probe.RATE_NUM_MAX} probes a second"
        elif (challenge := keys.get(order.node)) is None:
            error = "no challenge came with the order"
        else:
            try:
                proof = await ask(order.host, order.port, challenge.key)
            except OSError as failed:
                error = reason(failed)
        return NodeProbed(
            node=self._node,
            incarnation=self._incarnation,
            target=order.node,
            target_incarnation=order.incarnation,
            order=record.seq,
            epoch=record.epoch,
            proof=proof.hex(),
            error=error,
        )


class _Asking(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        if len(data) == node_probe.DATAGRAM_BYTES and not self.answered.done():
            self.answered.set_result(data)


async def ask(host: str, port: int, challenge: bytes) -> bytes:
    """Send a challenge; return the answer, b"" if none comes within PROBE_S_MAX. An answer is
    verified by the leader alone. Raises OSError if this host has no socket for it."""
    loop = asyncio.get_running_loop()
    transport, asking = await loop.create_datagram_endpoint(_Asking, remote_addr=(host, port))
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            for _ in range(SENDS_NUM_MAX):
                transport.sendto(challenge)
                done, _ = await asyncio.wait([asking.answered], timeout=SEND_S)
                if done:
                    break
            return await asking.answered
    except TimeoutError:
        return b""
    finally:
        transport.close()


def answer_probes(shim: Shim, host: str, port: int | None, secret: bytes) -> int:
    """Have the shim answer probes at this address, and return the port; NO_PORT: it does not.
    `port` None: the first free one from PORT_FIRST on. One that the shim has already stays."""
    former = shim.held.get(PROBES)
    if former is not None:
        with socket.socket(fileno=former.files[0]) as own:
            return int(own.getsockname()[1])
    if port == NO_PORT:
        return NO_PORT
    try:
        with _bound(host, [port] if port else range(PORT_FIRST, PORT_FIRST + PORTS_NUM)) as own:
            shim.answer_probes(own.fileno(), secret)
            return int(own.getsockname()[1])
    except OSError as error:
        _log.warning(
            "this node answers no probes: if it falls silent, its peers have to notice",
            host=host,
            why=reason(error),
            hint="unicron agent --probe-port PORT",
        )
        return NO_PORT


def _bound(host: str, ports: Sequence[int]) -> socket.socket:
    """A UDP socket at the first free port. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, ports[0], type=socket.SOCK_DGRAM)[0]
    own = socket.socket(family, kind)
    for port in ports:
        try:
            own.bind((address[0], port))
            return own
        except OSError:
            if port == ports[-1]:
                own.close()
                raise
    raise AssertionError("no port was given")
