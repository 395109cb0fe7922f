"""Clusters of real processes that all tests share, and the twins of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import RealCluster, Spec, running
from twins import Twins


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with running(tmp_path_factory.mktemp("two"), policy={
            "stopped_s_max": 4.0, "evidence_s_max": 4.0}) as made:
        yield made


@pytest.fixture(scope="session")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with running(tmp_path_factory.mktemp("three"), 3, {
            "silence_s_max": 2.0, "evidence_s_max": 4.0, "replace_after_s": 10.0,
            "stopped_s_max": 60.0}) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(two_nodes: RealCluster) -> Iterator[RealCluster]:
    """A running cluster of two nodes; a stopped rank has a few seconds to continue.

    All modules share it, since each node's first task loads torch and Megatron. It is restored
    when a module has ended.
    """
    yield two_nodes
    two_nodes.restore()


@pytest.fixture(scope="module")
def three(three_nodes: RealCluster) -> Iterator[RealCluster]:
    """A running cluster of three nodes, shared in the same way; a lost node is detected soon.

    A stopped rank has longer to continue than any test here stops one.
    """
    yield three_nodes
    three_nodes.restore()


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """Undisturbed trainings to compare with, each trained once."""
    made = Twins(tmp_path_factory.mktemp("twins"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Spec]:
    """A small GPT whose iteration lasts long enough to be struck in the middle."""
    def make(name: str, **changes: Any) -> Spec:
        return {
            "apiVersion": "unicron/v1", "name": name,
            "slots": {"min": 1, "max": changes.get("slots", 4)},
            "train": {
                "model": {"num_layers": 3, "hidden": 128, "num_heads": 4, "sequence": 128,
                          "dropout": changes.get("dropout", 0.0)},
                "batch": {"global": 48, "micro": 4},
                "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "warmup_iterations": 1},
                "iterations": changes.get("iterations", 40), "seed": 7,
                "output": str(tmp_path / "out" / name),
            },
        }
    return make
