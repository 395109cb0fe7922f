"""The paper's evaluation: its cluster, models, multi-task cases and traces. Our reading of it.

"Unicron", arXiv 2401.00134, section 7. Reported: 16 nodes of 8 A800-80GB and the five sizes of
GPT-3. The cases, weights and counts of faults are as we remember them; not told are the models'
batches, which nodes fail when, by what, and how long repairs of trace-b take.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from ...events import statuses as s
from ...events.model_spec import MegatronModel
from ...events.spec import API_VERSION, Slots
from .happening import Happening
from .scenario import Cluster, PaperTask, Scenario

NODES_NUM, NODE_SLOTS_NUM = 16, 8
DAY_S = 86400.0
SEED = 1
"""Of the trace that goes by the paper's name."""


def _gpt(layers: int, hidden: int, heads: int, batch: int) -> MegatronModel:
    return MegatronModel(num_layers=layers, hidden=hidden, num_heads=heads, sequence=2048,
                         vocabulary=50257, global_batch=batch, gpu="A800-80")


# Layers and widths of GPT-3 (arXiv 2005.14165, table 2.1) and of Megatron's weak scaling for 70 B;
# batches near theirs, in sequences.
MODELS: dict[str, MegatronModel] = {
    "1.3B": _gpt(24, 2048, 16, 512), "7B": _gpt(32, 4096, 32, 1024),
    "13B": _gpt(40, 5120, 40, 1024), "70B": _gpt(80, 8192, 64, 1536),
    "175B": _gpt(96, 12288, 96, 1536)}
SIZES = ("1.3B", "1.3B", "1.3B", "7B", "7B", "13B")
WEIGHTS = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
CASES: dict[int, tuple[tuple[str, ...], tuple[float, ...]]] = {
    1: (("7B",) * 6, (1.0,) * 6), 2: (("7B",) * 6, WEIGHTS), 3: (SIZES, (1.0,) * 6),
    4: (SIZES, WEIGHTS), 5: (SIZES, WEIGHTS[::-1])}
"""By number: six tasks' models, and their weights."""

SEV1_SHARES = {s.ECC_ERRORS: 5.0, s.NVLINK_ERRORS: 4.5, s.INVALID_DMA_MAPPING: 2.1,
               s.GPU_DRIVER_ERRORS: 0.6, s.LOST_CONNECTION: 3.3}
OTHER_SHARES = {s.NCCL_TIMEOUT: 10.1, s.OTHER_NETWORK: 4.0, s.LINK_FLAPPING: 3.9, s.TASK_HANG: 3.1,
                s.ILLEGAL_MEMORY_ACCESS: 2.1, s.CONNECTION_REFUSED: 2.1, s.CUDA_ERRORS: 1.6,
                s.CONNECTION_RESET: 1.0}
"""Per cent of tasks, as the paper reports; its "others" (3.3) stand for lost nodes here."""


class Trace(NamedTuple):
    """How a trace is drawn. A repair takes between `repair_s` evenly."""

    horizon_s: float
    num_sev1: int
    num_others: int
    repair_s: tuple[float, float]


TRACES: dict[str, Trace] = {
    "trace-a": Trace(56 * DAY_S, 10, 33, (1 * DAY_S, 7 * DAY_S)),
    # Twenty times the rate; that as many nodes stay in the pool asks for repairs as much shorter.
    "trace-b": Trace(7 * DAY_S, 26, 80, (DAY_S / 20, 7 * DAY_S / 20))}
"""10 SEV1 and 33 other faults in 8 weeks; 26 and 80 in a week."""


def happenings(trace: Trace, seed: int, repair_ratio: float = 1.0) -> list[Happening]:
    """Times and nodes evenly at random, of the nodes that are there; causes by their shares."""
    rng = random.Random(f"{seed}")
    times = [(rng.uniform(0, trace.horizon_s), hard)
             for hard, num in ((True, trace.num_sev1), (False, trace.num_others))
             for _ in range(num)]
    back_s = dict.fromkeys(Cluster(nodes=NODES_NUM).names, 0.0)
    found: list[Happening] = []
    for at_s, hard in sorted(times):
        node = rng.choice([name for name, until_s in back_s.items() if until_s <= at_s])
        shares = SEV1_SHARES if hard else OTHER_SHARES
        cause, = rng.choices(list(shares), list(shares.values()))
        found.append(Happening(at_s, node, "fault", cause))
        if hard:
            back_s[node] = at_s + repair_ratio * rng.uniform(*trace.repair_s)
            found.append(Happening(back_s[node], node, "repaired"))
    return sorted(one for one in found if one.at_s <= trace.horizon_s)


def tasks(case: int) -> tuple[PaperTask, ...]:
    """Of a case; each on whole nodes."""
    return tuple(PaperTask(name=f"{size.lower().replace('.', '-')}-{number}", weight=weight,
                           slots=Slots(min=NODE_SLOTS_NUM, max=NODES_NUM * NODE_SLOTS_NUM,
                                       multiple_of=NODE_SLOTS_NUM), model=MODELS[size])
                 for number, (size, weight) in enumerate(zip(*CASES[case], strict=True)))


def scenario(name: str, policies: Sequence[str]) -> Scenario:
    """A trace of the paper, over case 5. T_necessary: each task has a node at least."""
    return Scenario(
        api_version=API_VERSION, name=name,
        cluster=Cluster(nodes=NODES_NUM, slots=NODE_SLOTS_NUM), tasks=tasks(5),
        policies={policy: {} for policy in policies}, trace="",
        horizon_s=TRACES[name].horizon_s, whole_nodes=True, limits={"floor": True})
