"""What a script of Megatron-LM has set up before its first step, with or without Unicron.

`python megatron_set_up.py stock FILE SCRIPT ARGS...` stops Megatron-LM's own `pretrain` where it
would train. With `unicron` in place of `stock`, and UNICRON_LOOP and `--fd` as an agent gives them,
it stops the same script under Unicron. Both write every field to FILE, as JSON: nobody names one.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import stock_megatron

SECTIONS = (
    "arguments",
    "schedule",
    "parameter groups",
    "optimizer",
    "model",
    "data loader",
    "order of data",
    "datasets",
)
SAMPLES_NUM = 8
"""The samples of each dataset that are compared."""


def main() -> None:
    by, file, *sys.argv = sys.argv[1:]
    script = Path(sys.argv[0])
    os.environ.update(
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
        }
        | os.environ
    )
    if by == "unicron":
        os.environ["UNICRON_FD"] = sys.argv.pop()
        sys.argv.pop()
        _stop_unicron(script, Path(file))
    else:
        _stop_stock(script, Path(file))
    raise SystemExit("it has not been stopped")


def _stop_stock(script: Path, file: Path) -> None:
    stock_megatron.stand_in(script)
    training: Any = import_module("megatron.training.training")
    sets, loaders, stores = _recorded(training), [], []
    build_loader = training.build_pretraining_data_loader
    set_up = training.setup_model_and_optimizer

    def loader(*given: Any, **named: Any) -> Any:
        loaders.append(build_loader(*given, **named))
        return loaders[-1]

    def model_and_optimizer(*given: Any, **named: Any) -> Any:
        stores.append(set_up(*given, **named))
        return stores[-1]

    def train(*given: Any, **named: Any) -> None:
        _write(file, *stores[-1], loaders[0], sets)

    training.build_pretraining_data_loader = loader
    training.setup_model_and_optimizer, training.train = model_and_optimizer, train
    runpy.run_path(str(script), run_name="__main__")


def _stop_unicron(script: Path, file: Path) -> None:
    sys.path.insert(0, str(script.parent))
    from unicron.workers.training.rank import preload

    preload()
    from unicron.workers.training.megatron_lm import launcher, versions

    versions.complete_typing()
    from unicron.workers.training.megatron_lm import pretrain

    sets, loaders = _recorded(pretrain.load("training")), []
    build_loader = pretrain.Pretraining.loader

    def loader(self: Any) -> Any:
        loaders.append(build_loader(self))
        return loaders[-1]

    def step(job: Any) -> None:
        if not job.is_first:
            raise SystemExit
        trainee = job._driver.iteration.engine.trainee
        _write(file, trainee.ddps, trainee.optimizer, trainee.scheduler, loaders[0], sets)

    pretrain.Pretraining.loader = loader  # type: ignore[method-assign]
    pretrain.Job.step = step  # type: ignore[method-assign, assignment]
    sys.argv.insert(0, "")
    launcher.main()


def _recorded(training: Any) -> list[Any]:
    """The datasets, once they are built."""
    found: list[Any] = []
    build = training.build_train_valid_test_datasets

    def datasets(*given: Any, **named: Any) -> Any:
        found[:] = build(*given, **named)
        return tuple(found)

    training.build_train_valid_test_datasets = datasets
    return found


def _write(
    file: Path,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    loader: Any,
    sets: Sequence[Any],
) -> None:
    """Write all fields, and end this process."""
    args: Any = import_module("megatron.training.global_vars").get_args()
    num = args.train_iters * args.global_batch_size // args.micro_batch_size
    found = {
        "arguments": vars(args),
        "schedule": vars(scheduler),
        "parameter groups": {
            f"{place}.{name}": value
            for place, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
        },
        "optimizer": vars(
            optimizer.chained_optimizers[0].config
            if hasattr(optimizer, "chained_optimizers")
            else optimizer.config
        ),
        "model": {
            **vars(model[0].config),
            **{f"ddp.{name}": value for name, value in vars(model[0].ddp_config).items()},
        },
        "data loader": {
            name: value
            for name, value in vars(loader).items()
            if name not in ("dataset", "sampler", "batch_sampler")
        },
        "order of data": {"batches": list(islice(loader.batch_sampler, num))},
        "datasets": {
            f"{place}.{row}": dataset[row]
            for place, dataset in enumerate(sets)
            if dataset is not None
            for row in range(min(SAMPLES_NUM, len(dataset)))
        }
        | {
            f"{place}.length": len(dataset)
            for place, dataset in enumerate(sets)
            if dataset is not None
        },
    }
    assert tuple(found) == SECTIONS
    text = json.dumps(
        {
            section: {name: _described(value) for name, value in fields.items()}
            for section, fields in found.items()
        },
        sort_keys=True,
    )
    partial = file.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(file)
    sys.stdout.flush()
    os._exit(0)


def _described(value: Any) -> Any:
    """Equal for equal values, in every process."""
    torch: Any = import_module("torch")
    match value:
        case None | bool() | int() | str():
            return value
        case enum.Enum() | Path():
            return str(value)
        case Mapping():
            return {str(key): _described(each) for key, each in value.items()}
        case list() | tuple():
            return [_described(each) for each in value]
        case set() | frozenset():
            return sorted(map(repr, value))
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    text = repr(value)
    if " at 0x" in text:  # an object or a function
        return getattr(value, "__qualname__", type(value).__qualname__)
    return text


if __name__ == "__main__":
    main()
