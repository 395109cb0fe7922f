"""Exchanges state between the members of a generation, from live memory into live memory.

docs/ARCHITECTURE.md, "Settlement", says who tells whom. If the data of a sender fails a checksum,
or is of another step or model, all members exclude this sender and plan again.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
import structlog
import torch
from msgspec import Struct
from torch import Tensor

from ....events.decoding import from_msgpack
from ....events.spec.parallelism import coordinates
from ...ipc.work_row import UNCOUNTED, WorkCount
from ..model import training_state
from .peers import World, tensor_of
from .regions import State, cut
from .resharding import (
    DIGEST_BYTES,
    Holding,
    Missing,
    Move,
    Region,
    Shard,
    ShardList,
    nearest_first,
    plan_moves,
)
from .state_sources import NO_STATE, HeldState, overlap
from .state_transfer import transfer

LARGEST_NUM = 1 << 20
"""Maximum elements of a move. A larger region is split, so that several holders can send it."""
NO_LIST = bytes(DIGEST_BYTES)
NUMBERS = "numbers"
"""Stands for the numbers of the state among the keys that are missing."""
Note = Callable[[Literal["give", "receive", "moved"]], None]

log = structlog.get_logger()


class ExchangeResult(NamedTuple):
    """The numbers of the state (None: it neither has nor wants one), and the bytes received from
    each place (`taken`). `activate` copies the staged tensors into the active state."""

    numbers: training_state.Numbers | None
    activate: Callable[[], None]
    taken: dict[int, int]


class Offer(NamedTuple):
    """What all members know of a member: its step version, the digests of the lists of shards that
    it has and wants (NO_LIST: none), and the size of its numbers."""

    step_version: int
    have: bytes
    want: bytes
    numbers_bytes: int

    def encoded(self) -> bytes:
        """The offer in a fixed number of bytes."""
        return b"".join(
            (
                self.step_version.to_bytes(8, signed=True),
                self.have,
                self.want,
                self.numbers_bytes.to_bytes(8),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        want = 8 + DIGEST_BYTES
        return cls(
            int.from_bytes(data[:8], signed=True),
            data[8:want],
            data[want:-8],
            int.from_bytes(data[-8:]),
        )


class Request(Struct, frozen=True, array_like=True):
    """What a receiver asks of a sender: for each region, the index of the shard in the sender's
    list, and the region unless it is the whole shard; and whether it wants the numbers too."""

    regions: list[tuple[int, Region | None]]
    numbers: bool


class Told(Struct, frozen=True, array_like=True):
    """What a member tells of its plan: the places that send to it; or why it has none: the keys
    that no holder has, and the holders of another model, by place, with the reason."""

    senders: list[int] = []
    missing: tuple[str, ...] = ()
    odd: dict[int, str] = {}


class Answer(Struct, frozen=True, array_like=True):
    """What a member learns of the plans of all: the receivers to which it sends; or, on all
    members, why there is no plan, as in Told."""

    receivers: list[int] = []
    missing: tuple[str, ...] = ()
    odd: dict[int, str] = {}


class _Memory(NamedTuple):
    """Shards, and the tensor of each."""

    shards: Sequence[Shard]
    tensors: Sequence[Tensor]

    def part(self, index: int, region: Region | None) -> Tensor:
        """The live view of `region` in the shard at this index; None: all of it."""
        if region is None:
            return self.tensors[index]
        return cut(self.tensors[index], self.shards[index].region, region)


class _Side(NamedTuple):
    """What one member sends and receives, by place; `staged` are pairs of active and new tensor."""

    give: dict[int, list[Tensor]]
    take: dict[int, list[Tensor]]
    staged: list[tuple[Tensor, Tensor]]


class Plan(NamedTuple):
    """This member's moves, and the place that sends the numbers (NO_STATE: it has them)."""

    moves: list[Move]
    numbers_from: int

    def requests(self, me: int, have: Callable[[int], ShardList]) -> dict[int, Request]:
        """The request to each sender; `have` is the list of a place."""
        regions: dict[int, list[tuple[int, Region | None]]] = {}
        for move in self.moves:
            if move.source != me:
                is_whole = have(move.source).shards[move.given].region == move.region
                regions.setdefault(move.source, []).append(
                    (move.given, None if is_whole else move.region)
                )
        senders = regions.keys() | ({self.numbers_from} - {NO_STATE})
        return {
            place: Request(regions.get(place, []), place == self.numbers_from)
            for place in sorted(senders)
        }


class Planner:
    """Plans what this member receives, and agrees on who sends to whom. As `exchange`."""

    def __init__(
        self,
        peers: World,
        have: ShardList,
        want: ShardList | None,
        *,
        step_version: int,
        held: Mapping[int, HeldState],
        seat: HeldState,
        nodes: Sequence[str],
    ) -> None:
        self.peers, self.have, self.want = peers, have, want
        self.step_version, self.held, self.seat, self.nodes = step_version, held, seat, nodes
        self.offers: Sequence[Offer] = ()
        self.receivers: list[int] = []
        self.senders: dict[int, bytes] = {}
        """The digest of each holder's list, without the excluded holders."""
        self._lists: dict[bytes, ShardList] = {}
        """The lists of other members that were read."""
        self._failed: set[int] = set()

    def offer(self, own_version: int, numbers_bytes: int) -> None:
        """Tell all members what this member has and wants, and learn what they have and want."""
        mine = Offer(
            own_version,
            self.have.digest if self.have.shards else NO_LIST,
            self.want.digest if self.want is not None else NO_LIST,
            numbers_bytes,
        )
        self.offers = [Offer.decode(each) for each in self.peers.collect(mine.encoded())]
        self.receivers = [place for place, offer in enumerate(self.offers) if offer.want != NO_LIST]
        for place in sorted(self.held):
            if (found := self.offers[place].step_version) == self.step_version:
                self.senders[place] = self.offers[place].have
            else:
                _excluded(place, f"it is of step {found}, not {self.step_version}")

    def plan(self) -> tuple[Plan, list[int]]:
        """This member's plan, and the receivers that it sends to. Raises Missing on all members
        if a receiver finds no holder of some part, and RuntimeError if such a holder failed."""
        while True:
            self._describe()
            plan, mine = Plan([], NO_STATE), Told()
            if self.want is not None:
                plan, mine = self._own_plan(self.want)
            answer = from_msgpack(
                self.peers.scatter(msgspec.msgpack.encode(mine), answers_to_plans), Answer
            )
            if not (answer.missing or answer.odd):
                return plan, answer.receivers
            for place, why in sorted(answer.odd.items()):
                _excluded(place, why)
                del self.senders[place]
            if not answer.odd:
                missing = Missing(answer.missing)
                if not self._failed:
                    raise missing
                # State altered in transit is not lost: the next generation exchanges it again.
                raise RuntimeError(f"{missing}, without those at {sorted(self._failed)}")

    def were_right(self, bad: set[int]) -> bool:
        """Whether no member has received wrong data; `bad` are the places that sent this one some.
        If one has, all members exclude the senders."""
        if self.peers.all(not bad):
            return True
        told = self.peers.collect(msgspec.msgpack.encode(bad))
        self._exclude({place for each in told for place in from_msgpack(each, set[int])})
        return False

    def _exclude(self, places: set[int]) -> None:
        log.warning("senders of state are excluded", places=sorted(places), why="wrong checksum")
        self._failed |= places
        for place in places:
            self.senders.pop(place, None)

    def list_of(self, place: int) -> ShardList:
        """The list of shards that a holder has. Reads its description if it is not known."""
        digest = self.offers[place].have
        for own in (self.want, self.have):
            if own is not None and own.digest == digest:
                return own
        if digest not in self._lists:
            try:
                self._lists[digest] = ShardList.decode(self.peers.read(f"shards/{digest.hex()}"))
            except ValueError as error:
                raise RuntimeError(str(error)) from None
        return self._lists[digest]

    def _describe(self) -> None:
        """Publish the list of this member, if it is the first sender that has it, and a receiver
        may read it: its own list is none of the senders', or some senders should have equal lists
        and have not."""
        known = set(self.senders.values())
        alike = {(self.held[place].shards, digest) for place, digest in self.senders.items()}
        if all(self.offers[place].want in known for place in self.receivers) and len(alike) == len(
            {shards for shards, _ in alike}
        ):
            return
        first = {digest: place for place, digest in reversed(self.senders.items())}
        if first.get(self.have.digest) == self.peers.place:
            self.peers.publish(f"shards/{self.have.digest.hex()}", self.have.encoded)

    def _own_plan(self, want: ShardList) -> tuple[Plan, Told]:
        me, odd = self.peers.place, dict[int, str]()
        dp = coordinates(self.seat.axes, self.seat.place).dp

        def readable(places: Sequence[int]) -> Iterator[Holding]:
            held = self.list_of(places[0])
            differs = next(
                (key for key, kind in held.kinds.items() if want.kinds.get(key, kind) != kind), None
            )
            if differs is None:
                yield Holding(held, places)
            odd.update(
                (place, f"its {differs} is {held.kinds[differs]}, not {want.kinds[differs]}")
                for place in places
                if differs is not None
            )

        order = nearest_first(
            me, self.senders, self.nodes, lambda place: overlap(self.seat, self.held[place])
        )
        alike = {
            self.senders[place]
            for place in self.senders
            if self.held[place].shards == self.seat.shards
        }
        for digest, places in order:
            if digest in alike - {want.digest}:  # perhaps of another model
                list(readable(places))
        if want.digest in self.senders.values():
            order = [
                (digest, places)
                for digest, places in order
                if digest == want.digest or me in places
            ]
        moves: list[Move] = []
        missing: tuple[str, ...] = ()
        try:
            moves = plan_moves(
                me,
                want,
                (each for _, places in order for each in readable(places)),
                LARGEST_NUM,
                dp,
            )
        except Missing as error:
            missing = error.keys
        numbers_from = NO_STATE
        if self.offers[me].step_version != self.step_version:
            near = nearest_first(me, dict.fromkeys(self.senders, b""), self.nodes)
            if near:
                numbers_from = near[0][1][dp % len(near[0][1])]
            else:
                missing = (*missing, NUMBERS)
        senders = {move.source for move in moves} | {numbers_from}
        return Plan(moves, numbers_from), Told(sorted(senders - {me, NO_STATE}), missing, odd)

    def ask(self, plan: Plan, targets: Sequence[int]) -> dict[int, Request]:
        """Send this member's requests; the requests of `targets`."""
        mine = plan.requests(self.peers.place, self.list_of)
        told = self.peers.swap(
            {place: encode_request(each) for place, each in mine.items()}, targets
        )
        return {place: decode_request(data) for place, data in told.items()}


def answers_to_plans(told: Sequence[bytes]) -> list[bytes]:
    """The answers to what all members have told of their plans, by place."""
    plans = [from_msgpack(each, Told) for each in told]
    missing = tuple(sorted({key for plan in plans for key in plan.missing}))
    odd = {place: why for plan in plans for place, why in plan.odd.items()}
    if missing or odd:
        return [msgspec.msgpack.encode(Answer([], missing, odd))] * len(plans)
    receivers: list[list[int]] = [[] for _ in plans]
    for place, plan in enumerate(plans):
        for sender in plan.senders:
            receivers[sender].append(place)
    return [msgspec.msgpack.encode(Answer(each)) for each in receivers]


def exchange(
    peers: World,
    have: State,
    want: State,
    numbers: training_state.Numbers | None,
    *,
    step_version: int,
    held: Mapping[int, HeldState],
    seat: HeldState,
    nodes: Sequence[str],
    staged: bool,
    note: Note = lambda event: None,
    count: WorkCount = UNCOUNTED,
) -> ExchangeResult:
    """Fill `want` with the state after `step_version` steps from the members at the places `held`.

    All members call it, each with its shards and its `numbers` (None: it has no valid state).
    `held`: the parts that the holders have, by place; `seat`: the part that this member wants.
    `staged`: `want` is the active state; it changes only in `activate`, for which the data takes
    more memory. `count`: as in `transfer`; it ends an exchange that is obsolete.
    Raises RuntimeError; Missing, on all members, if the holders lack a part.
    """
    encoded = b"" if numbers is None else msgspec.msgpack.encode(numbers)
    targets = {} if want is have else want
    planner = Planner(
        peers,
        ShardList(have),
        ShardList(want) if targets else None,
        step_version=step_version,
        held=held,
        seat=seat,
        nodes=nodes,
    )
    planner.offer(NO_STATE if numbers is None else numbers.step_version, len(encoded))
    mine = _Memory(planner.have.shards, [*have.values()])
    theirs = _Memory([*targets], [*targets.values()])
    while True:
        plan, receivers = planner.plan()
        requests = planner.ask(plan, receivers)
        side = _side(peers.place, plan, mine, theirs, staged=staged)
        new_numbers = torch.empty(
            planner.offers[plan.numbers_from].numbers_bytes if plan.numbers_from != NO_STATE else 0,
            dtype=torch.uint8,
        )
        if plan.numbers_from != NO_STATE:
            side.take.setdefault(plan.numbers_from, []).append(new_numbers)
        for place, request in requests.items():
            side.give[place] = [mine.part(*each) for each in request.regions]
            if request.numbers:
                side.give[place].append(tensor_of(encoded))
        if side.give:
            note("give")
        if side.take:
            note("receive")
        bad = transfer(side.give, side.take, count)
        note("moved")
        if planner.were_right(bad):
            break

    def activate() -> None:
        for live, new in side.staged:
            live.copy_(new)

    if plan.numbers_from != NO_STATE:
        numbers = _read(new_numbers)
    return ExchangeResult(
        numbers,
        activate,
        {
            place: sum(tensor.nbytes for tensor in tensors if tensor is not new_numbers)
            for place, tensors in sorted(side.take.items())
        },
    )


def encode_request(request: Request) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(request), level=1)


def decode_request(data: bytes) -> Request:
    """Raises RuntimeError."""
    try:
        return from_msgpack(zlib.decompress(data), Request)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise RuntimeError(f"the request cannot be decoded: {error}") from None


def _excluded(place: int, why: str) -> None:
    log.warning("a holder of state is excluded", place=place, why=why)


def _side(me: int, plan: Plan, mine: _Memory, theirs: _Memory, *, staged: bool) -> _Side:
    """What this member receives. Data that it has itself is copied immediately."""
    side = _Side({}, {}, [])
    for region, source, given, wanted in plan.moves:
        place = theirs.part(wanted, region)
        new = place
        if staged:
            new = torch.empty_like(place)
            side.staged.append((place, new))
        if source == me:
            new.copy_(mine.part(given, region))
        else:
            side.take.setdefault(source, []).append(new)
    return side


def _read(encoded: Tensor) -> training_state.Numbers:
    try:
        return from_msgpack(encoded.numpy().data, training_state.Numbers)
    except msgspec.MsgspecError as error:
        raise RuntimeError(f"the numbers cannot be decoded: {error}") from None
