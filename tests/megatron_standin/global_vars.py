"""Arguments, timers and the writer; one set per process."""

import argparse
from contextlib import nullcontext

_ARGS = None


class _Timer(nullcontext):
    def start(self, barrier=False):
        pass

    def stop(self):
        pass


def get_args():
    assert _ARGS is not None, "args is not initialized."
    return _ARGS


def get_timers():
    return lambda name, log_level=0: _Timer()


def get_tensorboard_writer():
    return None


def set_global_variables(extra_args_provider, args_defaults):
    global _ARGS
    assert _ARGS is None, "args is already initialized."
    parser = argparse.ArgumentParser()
    for name, default in (("micro-batch-size", 2), ("global-batch-size", 12), ("train-iters", 12),
                          ("train-samples", 0), ("eval-interval", 5), ("eval-iters", 1),
                          ("log-interval", 1), ("seed", 1234), ("seq-length", 16),
                          ("num-layers", 2), ("hidden-size", 32), ("num-attention-heads", 4),
                          ("context-parallel-size", 1), ("padded-vocab-size", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--use-torch-fsdp2", action="store_true")
    parser.add_argument("--load")
    parser.add_argument("--tokenizer-type")
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    _ARGS = parser.parse_args()
    for name, value in args_defaults.items():
        if getattr(_ARGS, name, None) is None:
            setattr(_ARGS, name, value)
    _ARGS.iteration = _ARGS.consumed_train_samples = 0
