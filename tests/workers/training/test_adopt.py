"""Custom loops: what can be recovered in memory, how a driver runs them, and without an agent."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launcher import launch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from structlog.testing import capture_logs
from unicron.events.spec.job import Train
from unicron.events.spec.model import Axes, MegatronModel
from unicron.events.spec.parallelism import Parallel
from unicron.events.spec.support import RECOVERED, ROWS
from unicron.workers.training.adopt.custom_loop import ROW_CHECKS, BuiltLoop, unsupported

EXAMPLE = Path(__file__).parents[3] / "deploy" / "examples" / "loop.py"
TRAIN = Train(iterations=4, output="/tmp/none")
PLAIN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "calculate_per_token_loss": True,
    "use_cpu_initialization": True,
}
CASES: dict[str, list[dict[str, Any]]] = {
    "context parallel": [{"config": {"context_parallel_size": 2}}],
    "expert parallel": [{"config": {"num_moe_experts": 4, "expert_model_parallel_size": 2}}],
    "experts, other options": [
        {"config": {"num_moe_experts": 4, "moe_router_force_load_balancing": True}},
        {"config": {"num_moe_experts": 4, "moe_token_dispatcher_type": "flex"}},
        {
            "config": {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.1},
            "parallel": Parallel(tensor=(1, 2)),
        },
        {
            "config": {"num_moe_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
            "parallel": Parallel(tensor=(1, 2)),
        },
        {
            "config": {"num_moe_experts": 4, "moe_input_jitter_eps": 0.1},
            "parallel": Parallel(pipeline=(1, 2)),
        },
    ],
    "experts balanced over replicas": [
        {
            "config": {
                "num_moe_experts": 4,
                "moe_router_load_balancing_type": ["global_aux_loss"],
                "moe_aux_loss_coeff": [0.1],
            }
        }
    ],
    "parameter gather overlapped with the step": [
        {
            "optimizer": {
                "overlap_param_gather_with_optimizer_step": True,
                "use_distributed_optimizer": True,
            }
        }
    ],
    "several instances of the distributed optimizer": [
        {"ddp": {"num_distributed_optimizer_instances": 2}}
    ],
    "FSDP": [{"ddp": {"use_megatron_fsdp": True}}],
    "FP8 or FP4": [{"config": {"fp8": "hybrid"}}],
    "CUDA graphs": [{"config": {"cuda_graph_impl": "local", "use_te_rng_tracker": True}}],
    "torch.compile": [{"module": "compiled"}, {"module": "compiled in place"}],
    "registered communication buffers": [
        {"ddp": {"nccl_ub": True}},
        {
            "config": {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "tp_comm_overlap": True,
            }
        },
    ],
    "offloading to the CPU": [
        {"config": {"cpu_offloading": True, "cpu_offloading_num_layers": 1}},
        {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}},
    ],
    "dropout across a change of TP or PP": [
        {"config": {"attention_dropout": 0.1}, "parallel": Parallel(tensor=(1, 2))},
        {"config": {"hidden_dropout": 0.1}, "parallel": Parallel(pipeline=(1, 2))},
    ],
    "gradients scaled by the number of replicas": [
        {"config": {"calculate_per_token_loss": False}},
        {"ddp": {"average_in_collective": True}},
    ],
    "gradients summed in 16 bits": [
        {
            "config": {"bf16": True, "params_dtype": torch.bfloat16},
            "ddp": {"grad_reduce_in_fp32": False},
        }
    ],
    "an optimizer other than Adam": [
        {"optimizer": {"optimizer": "sgd"}},
        {"later": {"use_precision_aware_optimizer": True}},
    ],
}


# --- what can be recovered in memory --------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("none", ""),
        ("bare", "GPTModel is not megatron.core.distributed.DistributedDataParallel"),
        ("scaled", "gradients scaled by the number of replicas: the number changes"),
        ("sums", "gradients summed in 16 bits: the sum depends on its order"),
        ("sgd", "the state of torch.optim.sgd.SGD is not known"),
        ("sharded", "the optimizer is whole, but loop.parallel.optimizer is not"),
        ("schedule", "its schedule is a SimpleNamespace"),
        ("layout", "`build` was called for Axes(tp=2"),
        ("no length", "pipeline stages need the length of a sample"),
        ("no names", "the parameters of a Sequential in a pipeline have no unique names"),
    ],
)
def test_the_reason_against_in_memory_recovery_is_named(alone: Any, change: str, why: str) -> None:
    import torch
    from msgspec.structs import replace
    from unicron.workers.training.adopt import custom_loop
    from unicron.workers.training.model import optimizers
    from unicron.workers.training.model import trainee as model

    trainee = model.build(TRAIN, torch.device("cpu"), alone)
    (ddp,), scheduler, train, axes = trainee.ddps, trainee.scheduler, TRAIN, Axes()
    if change == "bare":
        ddp = trainee.modules[0]
    elif change == "scaled":
        ddp.config.calculate_per_token_loss = False
    elif change == "sums":
        ddp.config.bf16, ddp.ddp_config.grad_reduce_in_fp32 = True, False
    elif change == "sgd":
        optimizers.chained(trainee.optimizer)[0].optimizer = torch.optim.SGD(ddp.parameters())
    elif change == "sharded":
        train = replace(train, parallel=replace(train.parallel, optimizer="sharded"))
    elif change == "schedule":
        scheduler = SimpleNamespace()
    elif change == "layout":
        axes = Axes(tp=2)
    elif change in ("no length", "no names"):
        train = replace(train, parallel=replace(train.parallel, pipeline=(1, 2)))
        if change == "no length":
            train = replace(train, model=replace(train.model, sequence=0))
        else:
            ddp.module = torch.nn.Sequential(ddp.module)
    if not why:
        custom_loop.check_recoverable([ddp], trainee.optimizer, scheduler, train, axes)
        return
    with pytest.raises(custom_loop.NotRecoverable) as unfit:
        custom_loop.check_recoverable([ddp], trainee.optimizer, scheduler, train, axes)
    assert str(unfit.value).startswith(why)


DESCRIBED: dict[str, Any] = {
    "num_layers": 4,
    "hidden": 128,
    "num_heads": 4,
    "sequence": 128,
    "vocabulary": 256,
    "gpu": "A100-80",
    "global_batch": 16,
    "recompute": "none",
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"num_query_groups": 4, "ffn_hidden": 512}, ""),
        ({"num_layers": 24}, "loop.model.num_layers is 24 in the job file, and 4 in the script"),
        ({"hidden": 256}, "loop.model.hidden is 256 in the job file, and 128 in the script"),
        (
            {"num_query_groups": 2},
            "loop.model.num_query_groups is 2 in the job file, and 4 in the script",
        ),
        ({"num_experts": 4}, "loop.model.num_experts is 4 in the job file, and 0 in the script"),
        (
            {"recompute": "full"},
            "loop.model.recompute is full in the job file, and none in the script",
        ),
        ({"sequence": 64}, "loop.model.sequence is 64 in the job file, and 128 in the script"),
        (
            {"global_batch": 32},
            "loop.model.global_batch is 32 in the job file, and 16 in the script",
        ),
    ],
)
def test_a_described_model_that_is_not_the_built_one_is_refused(
    alone: Any, change: dict[str, Any], why: str
) -> None:
    from unicron.workers.training.adopt import custom_loop
    from unicron.workers.training.model import trainee as model

    config = model.build(TRAIN, torch.device("cpu"), alone).ddps[0].config
    described = MegatronModel(**DESCRIBED | change)
    if not why:
        custom_loop.check_described(config, TRAIN, described)
        return
    with pytest.raises(custom_loop.NotTrainable) as error:
        custom_loop.check_described(config, TRAIN, described)
    assert str(error.value) == why


# --- how a driver runs a loop ---------------------------------------------------------------------
ALL, ENDS = 1 << 30, (1 << 30) + 1


class Between:
    """The rounds of a generation with one other member, which has finished some evaluations since
    the last step."""

    def __init__(self) -> None:
        self.other = 0
        self.told: list[int] = []

    def agree(self, mine: bytes, answer: Callable[[list[bytes]], bytes]) -> bytes:
        self.told.append(int(mine))
        return answer([mine, b"%d" % self.other])


class Script:
    """A driver with scripted steps: None is a new generation, a number >= 0 an iteration, and -n a
    new generation whose state has taken n steps."""

    def __init__(self, steps: list[int | None], fails: list[bool], others: list[int]) -> None:
        self.settled = 0
        self.iteration = SimpleNamespace()
        self.control = SimpleNamespace(waiting_for_others=lambda *_: nullcontext())
        self.communicators = SimpleNamespace(
            num_members=2, place=0, generation=1, interrupt=None, rounds=Between()
        )
        self._script, self._fails, self._others = steps, fails, others

    def steps(self) -> Generator[int | None]:
        for step in self._script:
            if step is not None and step >= 0:
                self.settled = step + 1
                yield step
                continue
            self.settled = self.settled if step is None else -step
            self.communicators.rounds.other = self._others.pop(0)
            yield None

    def run_collectively(self, call: Any) -> bool:
        if self._fails.pop(0):
            return False
        call()
        return True


def job(script: Script, iterations: int = 4) -> Any:
    from unicron.workers.training.adopt.adoption import Job

    return Job(
        script,
        SimpleNamespace(  # type: ignore[arg-type]
            train=SimpleNamespace(iterations=iterations), made=None
        ),
    )


def test_a_loop_sees_each_iteration_once_despite_new_generations() -> None:
    made = job(Script([None, 0, None, None, 1, 2, 3], [], [0] * 3))
    assert [(iteration, made.step()) for iteration in made] == [(n, n) for n in range(4)]
    made.finish()


def test_a_newcomer_begins_at_the_iteration_of_the_others() -> None:
    script = Script([None, 2, 3], [], [0])
    made = job(script)
    script.settled = 2
    assert [(iteration, made.step()) for iteration in made] == [(2, 2), (3, 3)]


@pytest.mark.parametrize(("num_finished", "seen"), [(0, [1, 2, 3]), (1, [1, 3]), (ALL, [1, 3])])
def test_a_step_of_the_others_is_taken_and_what_none_has_finished_evaluated(
    num_finished: int, seen: list[int]
) -> None:
    made = job(Script([None, 0, -2, 2, 3], [False] * 3, [0, num_finished]))
    called: list[int] = []
    steps = []
    for iteration in made:
        steps.append((iteration, made.step()))
        made.evaluate(lambda: called.append(made.iteration))
        if iteration == 2:
            break
    assert steps == [(0, 0), (1, 1), (2, 2)]
    assert called == seen


def test_after_a_rollback_step_returns_the_repeated_iteration() -> None:
    made = job(Script([None, 0, 1, -1, 1, 2, 3], [], [0] * 2))
    assert [(iteration, made.step()) for iteration in made] == [
        (0, 0),
        (1, 1),
        (2, 1),
        (2, 2),
        (3, 3),
    ]


def test_the_last_step_may_come_from_the_others() -> None:
    made = job(Script([None, 0, 1, 2, -4], [], [0] * 2))
    assert [made.step() for _ in made] == [0, 1, 2, 3]
    made.finish()
    assert made.step() == -1


def test_an_evaluation_that_nobody_has_finished_is_repeated() -> None:
    made = job(Script([None, 0, None, 1], [True, False, False], [0, 0]))
    for _ in made:
        made.step()
        break
    assert made.evaluate(lambda: 7) == 7
    assert made.evaluate(lambda: 8) == 8


def test_the_first_evaluation_that_nobody_has_finished_is_the_next() -> None:
    made = job(Script([None, 0, None, 1], [True, False], [0, 2]))
    for _ in made:
        made.step()
        break
    assert [made.evaluate(lambda n=n: n) for n in range(3)] == [None, None, 2]


def test_an_evaluation_is_not_repeated_after_a_rollback() -> None:
    made = job(Script([None, 0, 1, -1, 1, 2], [True, False], [0, ALL]))
    found = []
    for _ in made:
        made.step()
        if made.iteration == 2:
            found.append(made.evaluate(lambda: made.iteration))
            if len(found) == 2:
                break
    assert found == [None, 2]


def test_an_evaluation_that_others_have_passed_is_skipped() -> None:
    made = job(Script([None, 0, None, 1], [True, False], [0, ALL]))
    called: list[int] = []
    for _ in made:
        made.step()
        break
    assert made.evaluate(lambda: called.append(1)) is None
    assert made.evaluate(lambda: called.append(2)) is None
    assert called == []
    made.step()
    assert made.evaluate(lambda: 3) == 3


def test_after_a_step_all_evaluate_whatever_was_passed_before_it() -> None:
    """As a rank that joins does, which has taken no part in what was before."""
    made = job(Script([None, 0, None, 1], [False], [0, ALL]))
    for iteration in made:
        made.step()
        if iteration == 1:
            break
    assert made.evaluate(lambda: made.iteration) == 2


@pytest.mark.parametrize(("settled", "num_finished"), [(0, 0), (3, ALL)])
def test_what_a_newcomer_tells(settled: int, num_finished: int) -> None:
    script = Script([None, settled], [], [0])
    made = job(script)
    script.settled = settled
    for _ in made:
        break
    assert script.communicators.rounds.told == [num_finished]


def test_who_waits_for_the_end_has_passed_all_evaluations() -> None:
    script = Script([None, 0, 1, 2, 3, None], [], [0, 0])
    made = job(script)
    for _ in made:
        made.step()
    made.finish()
    assert script.communicators.rounds.told == [0, ENDS]


def test_after_a_rollback_in_finish_nobody_evaluates() -> None:
    """Those in `finish` do not come back to the script; a new member runs it from there on."""
    made = job(Script([None, 2, -2, 2, 3], [], [0, ENDS]))
    for _ in made:
        made.step()
        break
    with capture_logs() as logs:
        seen = [(made.step(), made.evaluate(lambda: 7)) for _ in range(2)]
    assert seen == [(2, None), (3, None)]
    assert "ranks have left the loop of the script" in logs[0]["event"]


def test_a_step_after_a_rollback_may_come_from_the_others() -> None:
    """After the rollback they have stepped again, and were in their evaluation."""
    script = Script([None, 0, 1, -1, -2, 2, 3], [False] * 5, [0] * 3)
    made = job(script)
    seen = []
    for _ in made:
        seen.append((made.step(), made.evaluate(lambda: made.iteration)))
    assert script.communicators.rounds.told == [0, ALL, 0]
    assert seen == [(0, 1), (1, 2), (1, 2), (2, 3), (3, 4)]


# --- without an agent -----------------------------------------------------------------------------
def run(folder: Path, name: str, num: int) -> list[dict[str, Any]]:
    """Run the example in `num` processes, as a launcher starts them; return its log lines."""
    found = launch(
        EXAMPLE, ["--iterations", "5", "--micro-batches", "4", "--losses", str(folder / name)], num
    )
    assert [code for code, _ in found] == [0] * num, found
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.thorough
def test_the_same_script_trains_without_an_agent(tmp_path: Path) -> None:
    one, two = run(tmp_path, "one", 1), run(tmp_path, "two", 2)
    assert [line["iteration"] for line in two] == list(range(5))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-6)
    assert {line["ranks"] for line in two} == {2}
    assert "validation" in one[4]
    assert "validation" in two[4]


# --- the support table against Megatron's configurations -----------------------------------------
class _Engine(torch.nn.Linear):
    __module__ = "transformer_engine.pytorch.module.linear"


def _module(kind: str) -> torch.nn.Module:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if kind == "transformer_engine":
        inner.append(type("TELinear", (_Engine,), {})(2, 2))
    if kind == "compiled":
        return torch.nn.Sequential(torch.compile(inner, backend="eager"))
    if kind == "compiled in place":
        inner[0].compile(backend="eager")
    return inner


def _found(case: dict[str, Any]) -> list[str]:
    ddp = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True} | case.get("ddp", {}))
    optimizer = OptimizerConfig(**{"optimizer": "adam", "lr": 1e-3} | case.get("optimizer", {}))
    for name, value in case.get("later", {}).items():  # its class asks for the package
        setattr(optimizer, name, value)
    return [
        row.what
        for row in unsupported(
            BuiltLoop(
                TransformerConfig(**PLAIN | case.get("config", {})),
                ddp,
                optimizer,
                case.get("parallel", Parallel()),
                [_module(case.get("module", ""))],
            )
        )
    ]


@pytest.mark.parametrize(
    ("what", "case"),
    [
        pytest.param(what, case, id=f"{what} {num}")
        for what, cases in CASES.items()
        for num, case in enumerate(cases)
    ],
)
def test_an_unsupported_configuration_is_found(what: str, case: dict[str, Any]) -> None:
    assert what in _found(case)


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"config": {"attention_dropout": 0.1, "hidden_dropout": 0.1}},
        {"module": "transformer_engine"},
        {"ddp": {"overlap_grad_reduce": True}},
        {
            "ddp": {"use_distributed_optimizer": True},
            "optimizer": {"use_distributed_optimizer": True},
            "parallel": Parallel(optimizer="sharded"),
        },
        {
            "ddp": {"use_distributed_optimizer": True},
            "optimizer": {"use_distributed_optimizer": True},
            "parallel": Parallel(optimizer="mirrored"),
        },
        {
            "config": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "parallel": Parallel(tensor=(1, 2)),
        },
        {
            "config": {
                "pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.float32,
                "virtual_pipeline_model_parallel_size": 2,
            },
            "parallel": Parallel(pipeline=(1, 2), chunks=2),
        },
        {
            "config": {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
        },
    ],
)
def test_a_supported_configuration_is_not_found(case: dict[str, Any]) -> None:
    assert _found(case) == []


def test_each_row_of_a_lower_tier_has_a_check() -> None:
    wanted = [row.what for row in ROWS if row.loop.grade not in RECOVERED]
    assert list(ROW_CHECKS) == wanted
    assert list(CASES) == wanted
