"""Nodes that a plan has nothing of: what is said of one makes no plan out of date."""

from __future__ import annotations

from ..state.cluster import ClusterState, live_tasks
from ..state.node import Node
from ..state.slots import usable


def is_bare(state: ClusterState, node: Node) -> bool:
    """Whether none of its slots may be given, nothing runs there and nobody has a seat there.

    Not while a task waits: what is told of why names slots that are out, and drained nodes.
    """
    return not (usable(node) or node.occupants or state.seated.tasks(node.name)) and all(
        task.target for task in live_tasks(state))
