"""Megatron-LM's own pretrain_gpt.py on the GPU: by its own loop, and under agents with a rank
killed. UNICRON_MEGATRON_LM names the clone.

With Apex or Transformer Engine installed, Megatron-LM takes FusedAdam and their layer norm.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path

import megatron_trial
from bench.recovery.rows import Row
from gpu import killed
from gpu.result import CUDA, NotPossible, of
from megatron_trial import MICRO_BATCHES, WORDS, Case, Fault, loss_rel
from real_cluster import running
from reference import orders, tolerance

ON_GPU = """
    --num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
    --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 12 --train-iters 12
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --mock-data --tokenizer-type NullTokenizer
    --vocab-size 8191 --split 90,10,0 --transformer-impl local --bf16
    --eval-interval 5 --eval-iters 2 --log-interval 1 --hidden-dropout 0 --attention-dropout 0
    --no-persist-layer-norm --no-masked-softmax-fusion""".split()  # noqa: SIM905
"""160 million parameters; the fusions are the defaults of Megatron-LM."""
ACCUMULATES = "fused_weight_gradient_mlp_cuda"
"""Apex's module for --gradient-accumulation-fusion, which is a default."""


def check(folder: Path, device: str) -> list[Row]:
    """Kill a rank in a backward, and compare all printed losses with three runs of Megatron-LM's
    own loop, which sum the micro-batches in three orders."""
    clones = megatron_trial.clones()
    if not clones:
        raise NotPossible("UNICRON_MEGATRON_LM names no clone of Megatron-LM")
    words = list(WORDS)
    if device == CUDA:
        fusion = () if util.find_spec(ACCUMULATES) else ("--no-gradient-accumulation-fusion",)
        words = [*ON_GPU, *fusion]
    case = Case(2, {}, model=words)
    try:
        with ThreadPoolExecutor() as threads:  # side by side: the time on a GPU may be limited
            runs = list(
                threads.map(
                    lambda order: megatron_trial.stock(clones[0], case, order=order),
                    orders(MICRO_BATCHES),
                )
            )
    except subprocess.CalledProcessError as error:
        raise AssertionError(f"Megatron-LM's own loop failed:\n{error.output[-4000:]}") from None
    expected = runs[0]
    print("Megatron-LM's own loop has printed", expected, flush=True)
    num, note = killed.prepare(device)
    case = case._replace(slots=num, faults=(Fault(num - 1),))
    with running(folder / "cluster", num_agents=1, num_slots=num) as cluster:
        healed = megatron_trial.struck(cluster, clones[0], case, folder / "out")
    (incident,) = healed.incidents
    assert {*expected} == {*healed.lines}, (expected, healed.lines)
    noise = max(loss_rel(line, run[place]) for run in runs[1:] for place, line in expected.items())
    gap = max(loss_rel(line, healed.lines[place]) for place, line in expected.items())
    assert gap <= tolerance([noise]), f"gap {gap}, noise {noise}: {expected} {healed.lines}"
    return [
        of("megatron_lm", "loss_gap", [gap], "relative", f"{len(expected)} printed losses"),
        of("megatron_lm", "noise", [noise], "relative", "the worst of three orders"),
        of("megatron_lm", "iterations_lost", [float(incident.iterations_lost)], ""),
        of("megatron_lm", "fault_to_step_s", healed.fault_to_step_s, "s", note),
    ]
