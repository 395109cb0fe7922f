"""One member's part of a settlement: its metadata and CPU time, among simulated peers.

The member runs the code of a rank: claims, settlement, offers, plan, requests. The other members
are answers that the same code encoded before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
from bench.settlement.model import list_at, num_layers
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import coordinates, num_positions
from unicron.workers.training.communicators.rounds import pack, unpack
from unicron.workers.training.recovery import peers, state_exchange
from unicron.workers.training.recovery.resharding import ShardList
from unicron.workers.training.recovery.settlement import (
    assign_micro_batches,
    find_receivers,
    settle,
)
from unicron.workers.training.recovery.state_exchange import (
    Answer,
    Offer,
    Planner,
    Told,
    answers_to_plans,
    encode_request,
)
from unicron.workers.training.recovery.state_sources import (
    NO_STATE,
    WHOLE,
    Claim,
    HeldState,
    decode_claims,
    encode_claim,
)
from unicron.workers.training.state_recovery import VERSIONS

TP, PP, SLOTS = 8, 4, 8
STEP = 1000
NUMBERS_BYTES = 20_000
MICRO_BATCHES_OF_REPLICA = 8
FEW_SHARDS = 80
"""With as many shards a rank, a receiver has the same senders as with more, and plans faster."""
NOTHING, NO_ANSWER = msgspec.msgpack.encode(Told()), msgspec.msgpack.encode(Answer())


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
            versions=VERSIONS,
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


class SimulatedPeers(peers.World):
    """The members of a scene as one sees them; counts the bytes that it sends and receives.

    `told`: what all tell of their plans, for the first member; `answers`: what it answers.
    """

    def __init__(
        self,
        place: int,
        offers: Sequence[bytes],
        described: Mapping[str, bytes],
        told: Sequence[bytes] = (),
        answers: Sequence[bytes] = (),
        requests: Mapping[int, bytes] | None = None,
    ) -> None:
        self.place, self.num = place, len(offers)
        self._offers, self._described = list(offers), described
        self._all_told, self._answers, self._requests = list(told), answers, requests or {}
        self.num_bytes = 0
        self.told = b""
        self.lists_read: list[str] = []

    def collect(self, data: bytes) -> Sequence[bytes]:
        """The offers of all."""
        self._offers[self.place] = data
        packed = pack(self._offers)
        self.num_bytes += len(data) + len(packed)
        if not self.place:
            self.num_bytes += sum(map(len, self._offers))
        return unpack(packed)

    def scatter(self, data: bytes, answers: Callable[[Sequence[bytes]], Sequence[bytes]]) -> bytes:
        """What this member learns of the plans of all. The first member makes the answers."""
        self.told = data
        if self.place or not self._all_told:
            mine = self._answers[self.place] if self._answers else NO_ANSWER
            self.num_bytes += len(data) + len(mine)
            return mine
        self._all_told[0] = data
        made = answers(self._all_told)
        self.num_bytes += sum(map(len, self._all_told)) + sum(map(len, made))
        return made[0]

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
        self.lists_read.append(name)
        return self._described[name]


class Cost(NamedTuple):
    """What a settlement costs one member."""

    metadata_bytes: int
    cpu_s: float


class World:
    """All members of a scene, as far as a member notices them."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.nodes = scene, scene.nodes()
        claims = [scene.claim(place) for place in range(scene.num)]
        self.claims = [encode_claim(claim, place) for place, claim in enumerate(claims)]
        settlement = settle(claims, scene.num_micro_batches, scene.after)
        self.held = settlement.holders
        self.receivers = find_receivers(settlement, claims, scene.after, "whole")
        self.offers = [self._offer(place) for place in range(scene.num)]
        lists = {
            each.digest: each
            for each in (list_at(scene.layers, scene.before, place) for place in self.held)
        }
        self.described = {f"shards/{digest.hex()}": each.encoded for digest, each in lists.items()}
        self._told: tuple[list[bytes], list[bytes]] | None = None
        self._requests: dict[int, dict[int, bytes]] = {}

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
        self, known: SimulatedPeers, mine: Callable[[ShardList], ShardList] = lambda known: known
    ) -> Planner:
        """The planner of one member, after its offer; `mine` makes its own lists."""
        scene, place = self.scene, known.place
        has, wants = place in self.held, place in self.receivers
        have = mine(list_at(scene.layers, scene.before, place)) if has else ShardList(())
        want = mine(list_at(scene.layers, scene.after, place)) if wants else None
        seat = HeldState(axes=scene.after, place=place) if wants else WHOLE
        planner = Planner(
            known, have, want, step_version=STEP, held=self.held, seat=seat, nodes=self.nodes
        )
        planner.offer(STEP if has else NO_STATE, NUMBERS_BYTES if has else 0)
        return planner

    def told(self) -> tuple[list[bytes], list[bytes]]:
        """What each member tells of its plan, and the first one's answers."""
        if self._told is None:
            told = list(all_told(self.scene._replace(layers=num_layers(FEW_SHARDS, PP))))
            self._told = told, answers_to_plans(told)
        return self._told

    def requests_to(self, place: int) -> dict[int, bytes]:
        """The requests of the receivers that ask the member at `place`."""
        if place not in self._requests:
            found: dict[int, bytes] = {}
            for other, told in enumerate(self.told()[0]):
                if place in msgspec.msgpack.decode(told, type=Told).senders:
                    planner = self.planner(SimulatedPeers(other, self.offers, self.described))
                    asked = planner.plan()[0].requests(other, planner.list_of)
                    found[other] = encode_request(asked[place])
            self._requests[place] = found
        return self._requests[place]

    def cost(self, place: int) -> tuple[Cost, SimulatedPeers]:
        """Run the settlement of one member; also what it has told and read."""
        scene, requests = self.scene, self.requests_to(place)
        packed, (told, answers) = pack(self.claims), self.told()
        known = SimulatedPeers(place, self.offers, self.described, told, answers, requests)
        gc.collect()
        gc.freeze()
        began_s = time.process_time()
        mine = encode_claim(scene.claim(place), place)
        known.num_bytes += len(mine) + len(packed)
        if place == 0:  # it collects the claims
            known.num_bytes += sum(map(len, self.claims)) + len(pack(self.claims))
        claims = decode_claims(unpack(packed))
        settlement = settle(claims, scene.num_micro_batches, scene.after)
        receivers = find_receivers(settlement, claims, scene.after, "whole")
        assert receivers == self.receivers
        planner = self.planner(known, lambda one: ShardList(one.shards))
        plan, targets = planner.plan()
        asked = planner.ask(plan, targets)
        cpu_s = time.process_time() - began_s
        assert asked.keys() == requests.keys()
        assert place not in receivers or plan.moves
        assert known.told == told[place], "it has other senders than with few shards"
        return Cost(known.num_bytes, cpu_s), known


@lru_cache
def all_told(few: Scene) -> Sequence[bytes]:
    """What each member of a scene with few shards tells of its plan.

    The receivers that may ask the members that are measured plan; the others tell what one of those
    does, with senders of other tensor-parallel ranks: so much, but of other members.
    """
    world, told = World(few), [NOTHING] * few.num
    planned: list[Told] = []
    for place in world.receivers:
        if len(world.receivers) > 1 and coordinates(few.after, place).tp:
            continue  # the measured members are of the first tensor-parallel rank, as are theirs
        known = SimulatedPeers(place, world.offers, world.described)
        world.planner(known).plan()
        told[place] = known.told
        planned.append(msgspec.msgpack.decode(known.told, type=Told))
    for place in world.receivers:
        if told[place] is NOTHING:
            like = planned[place % len(planned)]
            moved = 1 + place % (TP - 1)
            told[place] = msgspec.msgpack.encode(Told([sender + moved for sender in like.senders]))
    return told


def measured_places(num: int) -> tuple[int, ...]:
    """The members that are measured: the first, which collects, and one in the middle."""
    return 0, num // 2
