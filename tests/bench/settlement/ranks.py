"""One member's part of a settlement: its metadata and CPU time, among simulated peers.

The member runs the code of a rank: claims, settlement, offers, plan, requests. The other members
are answers that the same code encoded before.
"""

from __future__ import annotations

import gc
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
from bench.settlement.model import list_at, num_layers
from torch import Tensor
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, num_positions
from unicron.workers.training.communicators.communicators import pack_news, unpack_news
from unicron.workers.training.recovery import state_exchange
from unicron.workers.training.recovery.peers import World
from unicron.workers.training.recovery.resharding import ShardList
from unicron.workers.training.recovery.settlement import (
    assign_micro_batches,
    find_receivers,
    settle,
)
from unicron.workers.training.recovery.state_exchange import Offer, Planner, encode_request
from unicron.workers.training.recovery.state_sources import NO_STATE, WHOLE, Claim, HeldState

TP, PP, SLOTS = 8, 4, 8
STEP = 1000
NUMBERS_BYTES = 20_000
MICRO_BATCHES_OF_REPLICA = 8
NOTHING = msgspec.msgpack.encode(state_exchange.Told())


class Scene(NamedTuple):
    """A settlement: the layouts before and after, and the place that has no state (-1: none)."""

    before: Axes
    after: Axes
    joined: int
    layers: int

    @property
    def num(self) -> int:
        """The number of members."""
        return num_positions(self.before)

    @property
    def num_micro_batches(self) -> int:
        """The micro-batches of an iteration."""
        return MICRO_BATCHES_OF_REPLICA * self.before.dp

    def claim(self, place: int) -> Claim:
        """The claim of a member that was interrupted in the middle of an iteration."""
        if place == self.joined:
            return Claim()
        owned = assign_micro_batches(
            self.num_micro_batches, self.before.dp, coordinates(self.before, place).dp
        )
        return Claim(
            step_version=STEP,
            kept=owned[:3],
            owned=owned,
            assigned_in=7,
            begun=True,
            trained_in=7,
            held=HeldState(axes=self.before, place=place),
        )

    def nodes(self) -> list[str]:
        """The nodes by place."""
        return [f"node-{place // SLOTS}" for place in range(self.num)]


def scenes(num_ranks: int, num_shards: int) -> dict[str, Scene]:
    """A rank has joined without a state; the layout changes its shape."""
    axes = Axes(tp=TP, pp=PP, dp=num_ranks // (TP * PP))
    layers = num_layers(num_shards, PP)
    return {
        "joined": Scene(axes, axes, num_ranks // 2, layers),
        "reshaped": Scene(axes, Axes(tp=TP, pp=PP // 2, dp=2 * axes.dp), -1, layers),
    }


class SimulatedPeers(World):
    """The members of a scene as one sees them; counts the bytes that it sends and receives."""

    def __init__(
        self,
        place: int,
        offers: Sequence[bytes],
        described: Mapping[str, bytes],
        rows: Mapping[int, bytes] | None = None,
        requests: Mapping[int, bytes] | None = None,
    ) -> None:
        self.place, self.num = place, len(offers)
        self._offers, self._described = list(offers), described
        self._rows, self._requests = rows or {}, requests or {}
        self.num_bytes = self.num_read_bytes = 0
        self.row = b""

    def gather(self, record: bytes) -> Sequence[bytes]:
        """The offers of all."""
        self._offers[self.place] = record
        self.num_bytes += len(record) * (1 + self.num)
        return self._offers

    def collect(self, data: bytes) -> Sequence[bytes]:
        """What this member and those that ask it tell, each padded to the longest."""
        self.row = data
        longest = max(len(zlib.compress(each, level=1)) for each in (data, *self._rows.values()))
        self.num_bytes += (8 + longest) * (1 + self.num)
        return [
            data if place == self.place else self._rows.get(place, NOTHING)
            for place in range(self.num)
        ]

    def swap(self, outgoing: Mapping[int, bytes], sources: Collection[int]) -> Mapping[int, bytes]:
        """The requests of those that ask this member."""
        incoming = {place: self._requests[place] for place in sources}
        self.num_bytes += sum(8 + len(data) for data in (*outgoing.values(), *incoming.values()))
        return incoming

    def publish(self, name: str, data: bytes) -> None:
        """A description for the others."""
        assert self._described[name] == data
        self.num_bytes += len(data)

    def read(self, name: str) -> bytes:
        """A description of another."""
        self.num_bytes += len(self._described[name])
        self.num_read_bytes += len(self._described[name])
        return self._described[name]

    def transfer(
        self,
        give: Mapping[int, Sequence[Tensor]],
        take: Mapping[int, Sequence[Tensor]],
        goes_on: Callable[[], bool],
    ) -> set[int]:
        """The state itself is no metadata."""
        raise AssertionError("the bench ends before")


class Cost(NamedTuple):
    """What a settlement costs one member; `read_bytes` comes from the store."""

    metadata_bytes: int
    cpu_s: float
    read_bytes: int


class World:
    """All members of a scene, as far as a member notices them."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.nodes = scene, scene.nodes()
        self._asking: dict[int, tuple[dict[int, bytes], dict[int, bytes]]] = {}
        self.claims = [msgspec.msgpack.encode(scene.claim(place)) for place in range(scene.num)]
        claims = [scene.claim(place) for place in range(scene.num)]
        settlement = settle(claims, scene.num_micro_batches, scene.after)
        self.held = settlement.holders
        self.receivers = find_receivers(settlement, claims, scene.after, "whole")
        self.offers = [self._offer(place) for place in range(scene.num)]
        lists = {
            each.digest: each
            for each in (list_at(scene.layers, scene.before, place) for place in self.held)
        }
        self.described = {f"shards/{digest.hex()}": each.encoded for digest, each in lists.items()}

    def _offer(self, place: int) -> bytes:
        has, wants = place in self.held, place in self.receivers
        none = state_exchange.NO_LIST
        return Offer(
            STEP if has else NO_STATE,
            list_at(self.scene.layers, self.scene.before, place).digest if has else none,
            list_at(self.scene.layers, self.scene.after, place).digest if wants else none,
            NUMBERS_BYTES if has else 0,
        ).encoded()

    def planner(
        self, peers: SimulatedPeers, mine: Callable[[ShardList], ShardList] = lambda known: known
    ) -> Planner:
        """The planner of one member, after its offer; `mine` makes its own lists."""
        scene, place = self.scene, peers.place
        has, wants = place in self.held, place in self.receivers
        have = mine(list_at(scene.layers, scene.before, place)) if has else ShardList(())
        want = mine(list_at(scene.layers, scene.after, place)) if wants else None
        seat = HeldState(axes=scene.after, place=place) if wants else WHOLE
        planner = Planner(
            peers, have, want, step_version=STEP, held=self.held, seat=seat, nodes=self.nodes
        )
        planner.offer(STEP if has else NO_STATE, NUMBERS_BYTES if has else 0)
        return planner

    def those_that_ask(self, place: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """What the receivers that ask the member at `place` tell, and their requests to it."""
        rows: dict[int, bytes] = {}
        requests: dict[int, bytes] = {}
        at = coordinates(self.scene.before, place)
        for other in self.receivers:
            wants = coordinates(self.scene.after, other)
            stages = PP // self.scene.after.pp
            if other == place or (wants.tp, wants.pp) != (at.tp, at.pp // stages):
                continue  # it wants nothing that this member has
            peers = SimulatedPeers(other, self.offers, self.described)
            planner = self.planner(peers)
            plan, _ = planner.plan()
            rows[other] = peers.row
            asked = plan.requests(other, planner.list_of)
            if place in asked:
                requests[other] = encode_request(asked[place])
        return rows, requests

    def cost(self, place: int) -> Cost:
        """Run the settlement of one member."""
        scene = self.scene
        if place not in self._asking:
            self._asking[place] = self.those_that_ask(place)
        rows, requests = self._asking[place]
        blob = pack_news(self.claims)
        peers = SimulatedPeers(place, self.offers, self.described, rows, requests)
        gc.collect()
        gc.freeze()
        began_s = time.process_time()
        mine = msgspec.msgpack.encode(scene.claim(place))
        peers.num_bytes += len(mine) + len(blob)
        if place == 0:  # it collects the claims
            peers.num_bytes += sum(map(len, self.claims)) + len(pack_news(self.claims))
        claims = [msgspec.msgpack.decode(data, type=Claim) for data in unpack_news(blob)]
        settlement = settle(claims, scene.num_micro_batches, scene.after)
        receivers = find_receivers(settlement, claims, scene.after, "whole")
        assert receivers == self.receivers
        planner = self.planner(peers, lambda known: ShardList(known.shards))
        plan, targets = planner.plan()
        asked = planner.ask(plan, targets)
        cpu_s = time.process_time() - began_s
        assert asked.keys() == requests.keys()
        assert place not in receivers or plan.moves
        peers.collect(msgspec.msgpack.encode([]))  # whether all data was right
        return Cost(peers.num_bytes, cpu_s, peers.num_read_bytes + len(blob))
