"""Megatron-LM's `pretrain` with in-memory recovery; launcher.py puts it into the script.

It uses Megatron-LM's parser, globals, model setup and datasets, and the script's providers and
`forward_step`. Its loops replace `train` and `evaluate`:

- samples are read from the dataset by index, in the order of Megatron-LM's sequential sampler, so
  that a micro-batch is equal on every rank;
- the arguments describe one replica: `get_num_microbatches()` counts the whole batch, and the
  number of ranks need not divide it. `args.rank`, `args.world_size`, `args.data_parallel_size` and
  `parallel_state` follow each generation;
- the current members share the micro-batches of an evaluation;
- the current last rank prints the progress line and writes to TensorBoard.
"""

import argparse
import copy
import io
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from ....events.decoding import from_json
from ....events.errors import UsageError
from ....events.spec.job import Loop
from ....events.spec.parallelism import Parallel
from ...ipc.pipe_protocol import FD, LOOP
from . import arguments, index_builder
from .versions import Interface

from ..adopt.adoption import Declined, Job, adopt  # before megatron  # isort: skip
from ..adopt.arguments import Loss  # isort: skip
from ..communicators.communicators import group_of_one  # isort: skip
from ..dependencies.private_megatron import make_tensorboard_writer  # isort: skip
from ..model import cpu_device, determinism  # isort: skip
from . import own_loop  # isort: skip
from ..checkpoint.checkpoint import check_output  # isort: skip
from .checkpoints import Checkpoints, eval_batch, num_evaluations  # isort: skip
from .progress_line import Norms, Progress, StepResult  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip

START_ERRORS = (
    AssertionError,
    AttributeError,
    FileNotFoundError,
    ImportError,
    KeyError,
    TypeError,
    ValueError,
)
"""What Megatron-LM raises for wrong arguments; a RuntimeError may be the GPU's."""
WEIGHT_SHARDS = {
    "tensor_parallel_num_weight_shards": "gtp_weight_remat_size",
    "expert_tensor_parallel_num_weight_shards": "expert_gtp_weight_remat_size",
}
"""By argument of Megatron-LM from 0.19 on: by what the size of tensor parallelism is multiplied."""
OF_THE_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "sequence_parallel",
    "virtual_pipeline_model_parallel_size",
    "expert_tensor_parallel_size",
    *WEIGHT_SHARDS,
)
"""Arguments that follow the layout; a config of Megatron-LM has the same names."""
NOT_DETERMINISTIC = ("cross_entropy_loss_fusion", "num_experts", "use_flash_attn")
"""Arguments with which `reproducible: bitwise` declines, once the model is built."""
NOT_SET_UP = (
    "exit_signal_handler",
    "exit_signal_handler_for_training",
    "otel_enabled",
    "wandb_project",
)
"""Arguments for which Megatron-LM would install handlers or ask a server while it sets its globals.
Afterwards they are as they were given."""


def load(name: str) -> Any:
    """A module of megatron.training, which only a clone of Megatron-LM contains."""
    with cpu_device.uncompiled():
        return import_module(f"megatron.training.{name}")


def replacements(interface: Interface) -> Sequence[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Megatron-LM's `pretrain`, and the function that parses the arguments before it, each with the
    function with in-memory recovery that stands in for it. If recovery does not support the
    arguments, these run the script again without Unicron."""
    environment = dict(os.environ)
    stock = load("training").pretrain
    parse: Any = getattr(load("arguments"), "parse_and_validate_args", None)
    started: list[Start] = []

    def start(extra_args_provider: Any = None, args_defaults: Any = None) -> None:
        with _declined_runs_without_unicron(environment):
            started.append(_initialize(interface, extra_args_provider, args_defaults or {}))

    def parse_and_validate_args(
        extra_args_provider: Any = None,
        ignore_unknown_args: bool = False,
        args_defaults: Any = None,
    ) -> Any:
        start(extra_args_provider, args_defaults)
        if not started[-1].declined:
            return started[-1].args
        with start_errors_told():
            return parse(extra_args_provider, ignore_unknown_args, args_defaults or {})

    def pretrain(*positional: Any, **named: Any) -> None:
        given = signature(stock).bind(*positional, **named).arguments
        if not interface.script_parses:
            start(given.get("extra_args_provider"), given.get("args_defaults"))
        if why := started[-1].declined:
            own_loop.train(
                why,
                load("training"),
                load("global_vars").get_args,
                lambda: stock(*positional, **named),
            )
            return
        for name in ("process_non_loss_data_func", "non_loss_data_func"):
            if given.get(name) is not None:
                _say(f"{given[name].__name__}: not called, evaluations have the loss only")
        with _declined_runs_without_unicron(environment):
            _train(Pretraining(started[-1], given), given["train_valid_test_dataset_provider"])

    found: list[tuple[Callable[..., Any], Callable[..., Any]]] = [(stock, pretrain)]
    if parse is not None:
        found.append((parse, parse_and_validate_args))
    return found


@contextmanager
def _declined_runs_without_unicron(environment: Mapping[str, str]) -> Generator[None]:
    try:
        yield
    except Declined as why:
        _say(f"{why}; it is restarted as any command")
        _run_without_unicron(environment)


# --- the start ---
class Start(NamedTuple):
    """The validated arguments. `declined`: why Megatron-LM's own loop has to train; then there are
    none."""

    interface: Interface
    args: Any
    declined: str = ""


def _initialize(
    interface: Interface, extra_args_provider: Any, args_defaults: Mapping[str, Any]
) -> Start:
    """Parse and validate the arguments, set Megatron-LM's globals, compile what datasets need.
    Raises UsageError; Declined if in-memory recovery does not support the arguments."""
    ranks = {name: os.environ.get(name, "0") for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK="0", WORLD_SIZE="1")
    if not torch.cuda.is_available():
        cpu_device.prepare_device()
    loop = from_json(os.environ[LOOP], Loop)
    args, given = _parse(extra_args_provider)
    _set_layout(args, given, loop.parallel)
    if why := arguments.why_not(given):
        if not loop.copy_every:
            _decline(why)
        os.environ.update(ranks)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if all(one.name != name for one in given):  # else the arguments repeat it
                sys.argv += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        _say(f"Megatron-LM's own loop trains, and restarts from memory: {why}")
        return Start(interface, None, why)
    for line in arguments.named(given):
        _say(line)
    if loop.reproducible != "rounding" and not any(
        getattr(args, name, None) for name in NOT_DETERMINISTIC
    ):
        determinism.require()
        args.deterministic_mode, args.gradient_accumulation_fusion = True, False
    with _not_set_up(args), start_errors_told():
        _validate(interface, args, args_defaults)
    _check_chunks(args, loop.parallel)
    args.iteration = args.consumed_train_samples = 0
    if args.tensorboard_dir and load("global_vars").get_tensorboard_writer() is None:
        rank, args.rank = args.rank, args.world_size - 1  # the only rank that is given a writer
        make_tensorboard_writer(load("global_vars"), args)
        args.rank = rank
    _disable_reruns()
    if args.save:
        check_output(str(Path(args.save)), "--save")  # never a URL
    index_builder.ensure()
    return Start(interface, args)


@contextmanager
def _not_set_up(args: Any) -> Generator[None]:
    given = {name: getattr(args, name) for name in NOT_SET_UP if hasattr(args, name)}
    vars(args).update(dict.fromkeys(given, False), wandb_project="")
    load("initialize").init_persistent_async_worker = _no_process
    yield
    vars(args).update(given)


def _no_process(*given: Any, **options: Any) -> None:
    """In place of Megatron-LM's process that writes checkpoints: a thread of the rank does."""


def _validate(interface: Interface, args: Any, args_defaults: Mapping[str, Any]) -> None:
    """It also sets Megatron-LM's globals."""
    parsed: dict[str, Any] = {}
    if interface.script_parses:
        load("arguments").validate_args(args, args_defaults)
        load("global_vars").set_global_variables(args)
    else:
        parsed = {"args_defaults": args_defaults, "parsed_args": args}
    load("initialize").initialize_megatron(
        allow_no_cuda=True, skip_mpu_initialization=True, **parsed
    )


def _parse(extra_args_provider: Any) -> tuple[Any, list[arguments.Given]]:
    module = load("arguments")
    parser = module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            args = module.parse_args(extra_args_provider)
    except SystemExit as end:
        if not end.code:  # --help
            raise
        *_, line = said.getvalue().strip().splitlines()
        raise UsageError(
            line.partition("error: ")[2] or line, f"python {sys.argv[0]} --help lists the arguments"
        ) from None
    finally:
        sys.stderr.write(said.getvalue())
    return args, arguments.given(args, parser, sys.argv[1:])


def _set_layout(args: Any, given: Sequence[arguments.Given], parallel: Parallel) -> None:
    """Let the arguments be validated for the largest replica: what Megatron-LM derives from its
    sizes (padded vocabulary, sequence parallelism) then fits each layout. Raises UsageError."""
    for name, key, sizes in (
        ("tensor_model_parallel_size", "tensor", parallel.tensor),
        ("pipeline_model_parallel_size", "pipeline", parallel.pipeline),
    ):
        for one in given:
            if one.name == name and getattr(args, name) not in sizes:
                raise UsageError(
                    f"{one.option} is {getattr(args, name)}, but loop.parallel.{key} "
                    f"of the job file is {list(sizes)}",
                    f"write loop: {{parallel: {{{key}: [{getattr(args, name)}]}}}}",
                )
        setattr(args, name, max(sizes))
    args.world_size = args.tensor_model_parallel_size * args.pipeline_model_parallel_size


def _check_chunks(args: Any, parallel: Parallel) -> None:
    """Raises UsageError if the validated arguments interleave other stages than the job."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    if chunks != parallel.chunks:
        raise UsageError(
            f"by the arguments each rank has {chunks} virtual pipeline stages, but "
            f"loop.parallel.chunks of the job file is {parallel.chunks}",
            f"write loop: {{parallel: {{chunks: {chunks}}}}}",
        )


def _disable_reruns() -> None:
    """Nobody drives Megatron's rerun state machine here. Disabled, it still raises an error for a
    loss that is not finite; in any other mode it takes each call for a mistake."""
    reruns = import_module("megatron.core.rerun_state_machine")
    reruns.get_rerun_state_machine().set_mode(reruns.RerunMode.DISABLED)


@contextmanager
def start_errors_told() -> Generator[None]:
    """What Megatron-LM raises for wrong arguments becomes a UsageError."""
    try:
        yield
    except START_ERRORS as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()) or frame.line
        raise UsageError(
            f"Megatron-LM refuses the arguments: {type(error).__name__}: {text} "
            f"({os.path.basename(frame.filename)}:{frame.lineno})",
            "correct the arguments of the script in the job file",
        ) from error


def _decline(why: str) -> NoReturn:
    def nothing(*_: Any) -> Any:
        raise AssertionError

    with adopt(
        build=nothing, sample=nothing, forward=nothing, check=[lambda: why], falls_back=False
    ):
        raise AssertionError


def _run_without_unicron(environment: Mapping[str, str]) -> NoReturn:
    """Restart the same script in this process without Unicron, as a plain command."""
    sys.stderr.flush()
    sys.stdout.flush()
    plain = {name: value for name, value in environment.items() if name != FD}
    os.execve(sys.executable, [sys.executable, *sys.argv], plain)


def _say(line: str) -> None:
    sys.stderr.write(f"unicron: {line}\n")


# --- training ---
class Pretraining:
    """The script's functions as `adopt` takes them. `given`: the arguments of `pretrain`."""

    def __init__(self, start: Start, given: Mapping[str, Any]) -> None:
        self.args = args = start.args
        self.loss: Loss = "per_token" if args.calculate_per_token_loss else "per_micro_batch"
        self.training = load("training")
        self.rows = int(args.micro_batch_size)
        self.num_micro_batches = int(args.global_batch_size) // self.rows
        self._built_with = {
            "train_iters": args.train_iters,
            "load": None,
            "pretrained_checkpoint": None,
            start.interface.gloo_argument: False,
            "calculate_per_token_loss": True,
        }
        """Arguments while Megatron-LM builds model, optimizer and schedule. Without the number of
        iterations, unless it is given, its schedule counts samples. It must not load, build no
        group, and not scale gradients by the number of replicas: Unicron's step divides the sum."""
        args.train_iters = self.iterations = _num_iterations(self.training, args)
        if args.exit_interval:
            self.iterations = min(self.iterations, int(args.exit_interval))
        self.last: StepResult | None = None
        self.train_set: Any = None
        self.checkpoints = Checkpoints(
            args,
            load("global_vars").get_tokenizer().vocab_size,
            lambda: float(
                self.training.num_floating_point_operations(args, args.global_batch_size)
            ),
        )
        self._sequence_parallel = bool(args.sequence_parallel)
        self._chunks = args.virtual_pipeline_model_parallel_size
        self._model = {
            "model_provider_func": given.get("model_provider"),
            "model_type": given["model_type"],
        }
        self._config = given["cfg_container"] if start.interface.builds_config else None
        self._forward_step = given["forward_step_func"]

    def build(self, groups: Any, axes: Any, place: int) -> tuple[Sequence[Any], Any, Any]:
        args = self.args
        trained = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        # It sets the iteration to 0; a fault may come between a step and its progress line.
        outside = {name: getattr(args, name) for name in ("iteration", *self._built_with)}
        vars(args).update(self._built_with)
        self._set_sizes(axes.tp, axes.pp)  # may be another layout, for the initial weights
        with start_errors_told():
            model, optimizer, scheduler = self.training.setup_model_and_optimizer(
                **self._model, **self._configured()
            )
        vars(args).update(outside)
        self._set_sizes(*trained)
        self._record_steps(optimizer)
        return model, optimizer, scheduler

    def _configured(self) -> dict[str, Any]:
        if self._config is None:
            return {}
        config = copy.deepcopy(self._config)
        if config.model is not None:
            for name in (*OF_THE_LAYOUT, "calculate_per_token_loss"):
                if hasattr(self.args, name):
                    setattr(config.model, name, getattr(self.args, name))
        return {
            "cfg_container": config,
            "pg_collection": ProcessGroupCollection.use_mpu_process_groups(),
        }

    def rebuilt(self, groups: Any) -> None:
        """Make the arguments describe this generation."""
        self.args.rank, self.args.world_size = dist.get_rank(), dist.get_world_size()
        self.args.data_parallel_size = groups.dp.size()
        self._set_sizes(groups.tp.size(), groups.pp.size())

    def count(self, iteration: int) -> None:
        """Make the arguments describe the state after this number of iterations."""
        args = self.args
        args.curr_iteration = args.iteration = iteration
        args.consumed_train_samples = (
            self.checkpoints.first_sample + iteration * args.global_batch_size
        )

    def batch_of(self, dataset: Any, first: int) -> Any:
        return default_collate([dataset[first + row] for row in range(self.rows)])

    def loader(self) -> DataLoader[Any]:
        order = InOrder(
            self.checkpoints.first_sample, self.rows, self.iterations * self.num_micro_batches
        )
        return DataLoader(
            self.train_set, batch_sampler=order, num_workers=self.args.num_workers, pin_memory=True
        )

    def forward(self, chunk: Any, batch: Any) -> tuple[Any, Any]:
        out, loss_func = self._forward_step(iter([copy.copy(batch)]), chunk)
        return out, loss_func

    def _set_sizes(self, tp: int, pp: int) -> None:
        args = self.args
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size = tp, pp
        # As Megatron-LM validates them.
        args.expert_tensor_parallel_size = tp
        args.sequence_parallel = self._sequence_parallel and tp > 1
        args.virtual_pipeline_model_parallel_size = self._chunks if pp > 1 else None
        for name, factor in WEIGHT_SHARDS.items():
            if hasattr(args, name):
                setattr(args, name, tp * getattr(args, factor))

    def _record_steps(self, optimizer: Any) -> None:
        """Keep what each step returns. The optimizer is not referenced: its memory must be free as
        soon as Unicron drops it."""
        found = weakref.ref(optimizer)

        def step() -> Any:
            made: Any = found()
            result = type(made).step(made)
            self.last = StepResult(*result)
            return result

        optimizer.step = step


def _num_iterations(training: Any, args: Any) -> int:
    """The iterations of the whole training. `args` stay as they are. Raises UsageError."""
    counted = copy.copy(args)
    with start_errors_told():
        training.update_train_iters(counted)
    if not counted.train_iters:
        raise UsageError(
            f"{args.train_samples} samples are less than one batch of {args.global_batch_size}",
            "correct --train-samples in the job file",
        )
    return int(counted.train_iters)


class InOrder(Sequence[list[int]]):
    """The sample indices of `num` micro-batches of `rows` samples each, in order from `first`."""

    def __init__(self, first: int, rows: int, num: int) -> None:
        self._batches = range(first, first + num * rows, rows)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: Any) -> Any:
        first = self._batches[number]
        return list(range(first, first + self._batches.step))


def _train(script: Pretraining, datasets: Callable[..., Any]) -> None:
    args, found = script.args, script.checkpoints
    with index_builder.one_at_a_time(args), group_of_one():
        script.train_set, valid_set, test_set = script.training.build_train_valid_test_datasets(
            datasets
        )
    progress = Progress(args, script.training, load("global_vars").get_tensorboard_writer())
    with adopt(
        build=script.build,
        sample=script.loader(),
        forward=script.forward,
        iterations=script.iterations,
        micro_batches=script.num_micro_batches,
        samples=script.rows,
        seed=int(args.seed),
        sequence=int(args.seq_length),
        loss=script.loss,
        on_rebuild=script.rebuilt,
        beginning=found,
        exports=found.exports,
        falls_back=False,
    ) as job:
        for done in job:
            script.last = None
            script.count(done)
            script.count(job.step() + 1)
            progress.stepped(args.iteration, script.last, job.auxiliary_losses)
            if args.empty_unused_memory_level:
                torch.cuda.empty_cache()
            if progress.is_due(args.iteration) or progress.is_written(args.iteration):
                norms = _norms(script, job)
                if job.iteration < args.iteration:  # set back: it comes here again
                    continue
                progress.report(job, norms)
            num_before = num_evaluations(args, args.iteration - 1)
            if num_evaluations(args, args.iteration) > num_before:
                _evaluate(
                    script,
                    job,
                    progress,
                    valid_set,
                    f"iteration {args.iteration}",
                    num_before,
                    found.first_valid_sample,
                )
            if args.iteration == script.iterations == args.train_iters:
                at = f"iteration {args.iteration} on"
                _evaluate(
                    script,
                    job,
                    progress,
                    valid_set,
                    f"{at} validation set",
                    num_evaluations(args, args.iteration),
                    found.first_valid_sample,
                )
                _evaluate(script, job, progress, test_set, f"{at} test set", 0, 0)


def _evaluate(
    script: Pretraining,
    job: Job,
    progress: Progress,
    dataset: Any,
    where: str,
    num_before: int,
    first_sample: int,
) -> None:
    """Evaluate the next eval_iters batches of `dataset` from `first_sample` on, of which
    `num_before` evaluations have used theirs."""
    num = int(script.args.eval_iters or 0) * (eval_batch(script.args) // script.rows)
    if not num or dataset is None:
        return
    first = num_before * num

    def mean() -> float:
        return job.mean_loss(
            num, lambda item: script.batch_of(dataset, first_sample + (first + item) * script.rows)
        )

    loss = job.evaluate(mean)
    if loss is not None:
        progress.validated(job, where, loss)


def _norms(script: Pretraining, job: Job) -> Norms:
    """What the arguments ask for; each needs a collective of all ranks."""
    args = script.args
    params_norm = num_zeros = None
    if args.log_params_norm:
        params_norm = job.evaluate(lambda: float(script.training.calc_params_l2_norm(job.chunks)))
    if args.log_num_zeros_in_grad:
        num_zeros = job.evaluate(lambda: _num_zeros(script, job))
    return Norms(params_norm, num_zeros)


def _num_zeros(script: Pretraining, job: Job) -> float | None:
    """The sum over the parts of the model; None if a rank does not know its own."""
    mine = script.last.num_zeros if script.last is not None else None
    values = torch.tensor(
        [mine or 0.0, float(mine is None)], dtype=torch.float64, device=job.device
    )
    dist.all_reduce(values, group=job.groups.mp)
    if script.args.use_distributed_optimizer:
        dist.all_reduce(values, group=job.groups.dp)
    total, num_unknown = values.tolist()
    return None if num_unknown else float(total)
