"""What a rank tells of its collectives: the operations that it has entered in each of its groups.

It comes from torch's flight recorder, or from the progress page of a rank that runs.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Group(NamedTuple):
    """A process group. Groups with other ranks are other groups, also under the same name."""

    name: str
    """Its name and description, as `72 EXPERT_MODEL_PARALLEL_GROUP`."""
    ranks: str = ""
    """Its ranks as text, whose hash Python keeps; "": unknown."""

    def __str__(self) -> str:
        return self.name


class Op(NamedTuple):
    """One entry: a collective of `group`, or a send or receive between two ranks of the group."""

    group: Group
    seq: int
    """Number of the collective in its group; sends and receives are counted separately."""
    name: str
    at_ns: int
    """When the rank entered the operation, by its own clock (nanoseconds since 1970)."""
    order: int
    """Its index among all operations of this rank."""
    has_started: bool = False
    source: int = -1
    """The sending rank of a send or receive; -1: this is a collective."""
    target: int = -1
    tensors: str = ""
    """Elements and data type of the input, as `4096 Float`. "": unknown, or sizes may differ."""

    @property
    def is_p2p(self) -> bool:
        return self.source >= 0

    @property
    def key(self) -> tuple[Group, int, int, int]:
        """Equal for all participants. Sends and receives are matched in order, not by number."""
        if self.is_p2p:
            return self.group, -1, self.source, self.target
        return self.group, self.seq, -1, -1


class Job(NamedTuple):
    """The job and its attempt, as far as a dump identifies them."""

    world: tuple[int, ...] = ()
    """All its ranks; empty: unknown."""
    task: int = 0
    """The Unicron task, in generation `generation`; 0: not a Unicron task."""
    generation: int = 0


class Dump(NamedTuple):
    """The content of one rank's recorder."""

    rank: int
    members: dict[Group, tuple[int, ...]]
    """Group -> its ranks. A group whose ranks are unknown is absent."""
    entered: dict[Group, int]
    """Group -> the last collective that this rank entered."""
    completed: dict[Group, int]
    status: dict[Group, tuple[int, int]]
    """Group -> entered and completed by `pg_status`, which includes sends and receives."""
    pending: tuple[Op, ...]
    """The operations that this rank entered and does not see as complete, oldest first."""
    ended: tuple[Op, ...]
    """The last complete collective of each group, according to this rank."""
    mixed: frozenset[Group]
    """Groups with sends and receives."""
    records_starts: bool
    """Whether its recorder records the start of kernels."""
    dumped_ns: int
    """When the dump was written; 0: unknown."""
    job: Job
    waits: bool | None = None
    """Whether the rank is in a call that waits for an operation; None: not told."""

    def with_ranks(self, known: Mapping[Group, Group]) -> "Dump":
        """The dump, in which groups of unknown ranks are those that `known` gives for them."""
        if not known:
            return self

        def of(group: Group) -> Group:
            return known.get(group, group)

        return self._replace(
            entered={of(group): last for group, last in self.entered.items()},
            completed={of(group): last for group, last in self.completed.items()},
            status={of(group): last for group, last in self.status.items()},
            pending=tuple(op._replace(group=of(op.group)) for op in self.pending),
            ended=tuple(op._replace(group=of(op.group)) for op in self.ended),
            mixed=frozenset(map(of, self.mixed)),
        )
