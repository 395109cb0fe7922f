"""Node loss: the rules by which a silent node is suspected or counts as lost.

A suspect's lease (service/leases.py) is shorter. Without a lease a node is unreachable, and lost
only if a second source confirms it.
"""

from collections.abc import Iterator

from ..state.cluster import ClusterState
from ..state.task import Rank, Task


def lost_nodes(
    state: ClusterState, task: Task
) -> Iterator[tuple[str, tuple[int, ...], str, tuple[int, ...]]]:
    """(node, the task's ranks there, why, evidence) of each unreachable node whose loss a second
    source confirms: a failed collective of a peer, a missed deadline of a rank there, or agents on
    other hosts that do not reach it (probes.py). If all
    nodes of the task are unreachable: a request that says they are off, or replace_after_s."""
    nodes = {rank.slot.node for rank in task.ranks.values()} if state.unreachable else ()
    silent = [name for name in state.unreachable if name in nodes]
    for name in silent:
        node, living = state.nodes[name], task.living_members()
        there = [task.ranks[key] for key in sorted(task.ranks) if task.ranks[key].slot.node == name]
        peers = [
            rank
            for rank in living
            if rank.slot.node not in silent and rank.failed == task.generation
        ]
        late = [rank for rank in there if rank.timeout_reason]
        if peers and len(living) == len(task.members):
            second = f"a collective failed under its peer rank {peers[0].rank}"
            seq = peers[0].failed_seq
        elif late:
            second = f"rank {late[0].rank} {late[0].timeout_reason}"
            seq = min((stall.seq for stall in task.stalls.values()), default=0)
        elif node.unreached_seq:
            second = f"{_names(node.unreached_by)} reaches it"
            seq = node.unreached_seq
        elif (
            not state.starts_held and (node.replace or node.down_seq) and _is_replaced(state, task)
        ):
            second = (
                f"its machine is off: {node.drain_reason}"
                if node.down_seq
                else f"silent for {state.policy.replace_after_s:g} s, the whole task on it"
            )
            seq = node.down_seq
        else:
            continue
        yield (
            name,
            tuple(rank.rank for rank in there),
            f"node {name} is silent; {second}",
            tuple(sorted(x for x in (node.unreachable_seq, seq) if x)),
        )


def _names(nodes: tuple[str, ...]) -> str:
    """Of agents that do not reach a node."""
    return f"neither {', '.join(nodes[:-1])} nor {nodes[-1]}"


def _is_replaced(state: ClusterState, task: Task) -> bool:
    """Whether all nodes of the task (without members: of its processes) are to be replaced."""
    nodes = [
        state.nodes.get(rank.slot.node) for rank in task.living_members() or task.ranks.values()
    ]
    return all(node is not None and (node.replace or node.down_seq) for node in nodes)


def suspects(state: ClusterState) -> set[str]:
    """Nodes that may be the cause of a failed or stalled collective: members on other nodes report
    it, and no member on these nodes does. The only effect is a shorter lease."""
    found: set[str] = set()
    for task in state.tasks.values():
        # A collective of this generation failed, or the generation did not come up.
        if task.phase != "ended" and (task.failed_s >= 0 or task.phase == "reconfiguring"):
            found.update(
                _without_report(
                    task, [rank for rank in task.living_members() if rank.failed == task.generation]
                )
            )
        elif any(stall.where == "collective" for stall in task.stalls.values()):
            found.update(
                _without_report(
                    task, [rank for rank in task.living_members() if rank.rank in task.stalls]
                )
            )
    return found


def _without_report(task: Task, reporting: list[Rank]) -> list[str]:
    """Nodes without a report of any member, if a member on another node has reported."""
    reported = {rank.slot.node for rank in reporting}
    return [
        rank.slot.node
        for rank in task.living_members()
        if reported and rank.slot.node not in reported
    ]
