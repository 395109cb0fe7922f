"""Clusters of real processes that several test modules share, and reference runs of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_cluster import RealCluster, running
from twins import Spec, Twins, small


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with running(
        tmp_path_factory.mktemp("two"), policy={"stopped_s_max": 4.0, "evidence_s_max": 4.0}
    ) as made:
        yield made


@pytest.fixture(scope="session")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with running(
        tmp_path_factory.mktemp("three"),
        3,
        {
            "silence_s_max": 2.0,
            "evidence_s_max": 4.0,
            "replace_after_s": 10.0,
            "stopped_s_max": 60.0,
            "agent_gone_s_max": 6.0,
        },
    ) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(two_nodes: RealCluster) -> Iterator[RealCluster]:
    """A running cluster of two nodes; a stopped rank has a few seconds to continue.

    All modules share one cluster, because each node's first task must load torch and Megatron. The
    cluster is restored after each module.
    """
    yield two_nodes
    two_nodes.restore()


@pytest.fixture(scope="module")
def three(three_nodes: RealCluster) -> Iterator[RealCluster]:
    """A running cluster of three nodes, shared like `cluster`; a lost node is detected soon.

    No test stops a rank for as long as `stopped_s_max`.
    """
    yield three_nodes
    three_nodes.restore()


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    """Undisturbed reference runs to compare with; each is trained once."""
    made = Twins(tmp_path_factory.mktemp("twins"))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., Spec]:
    """A small GPT whose iterations last long enough to inject a fault inside one."""

    def make(
        name: str, *, dropout: float = 0.0, iterations: int = 40, reproducible: str = "rounding"
    ) -> Spec:
        return small(
            name,
            tmp_path / "out",
            iterations=iterations,
            reproducible=reproducible,
            model={
                "num_layers": 3,
                "hidden": 128,
                "num_heads": 4,
                "sequence": 128,
                "dropout": dropout,
            },
            batch={"global": 48, "micro": 4},
            optimizer={"lr": 1e-3, "min_lr": 1e-4, "warmup_iterations": 1},
        )

    return make
