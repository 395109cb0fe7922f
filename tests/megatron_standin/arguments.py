"""The parser and the arguments that it makes."""

import argparse
import os


def add_megatron_arguments(parser):
    for name, default in (
        ("micro-batch-size", 2),
        ("global-batch-size", 12),
        ("train-iters", None),
        ("eval-interval", 5),
        ("eval-iters", 1),
        ("log-interval", 1),
        ("seed", 1234),
        ("seq-length", 16),
        ("num-layers", 2),
        ("hidden-size", 32),
        ("num-attention-heads", 4),
        ("context-parallel-size", 1),
        ("padded-vocab-size", 64),
        ("tensor-model-parallel-size", 1),
        ("pipeline-model-parallel-size", 1),
        ("exit-interval", None),
        ("tensorboard-log-interval", 1),
        ("empty-unused-memory-level", 0),
        ("save-interval", None),
        ("ckpt-step", None),
        ("virtual-pipeline-model-parallel-size", None),
        ("num-workers", 2),
        ("train-samples", None),
        ("lr-warmup-iters", 0),
        ("lr-warmup-samples", 0),
        ("lr-decay-iters", None),
        ("lr-decay-samples", None),
        ("lr-wsd-decay-iters", None),
        ("lr-wsd-decay-samples", None),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (
        ("lr", 1e-3),
        ("min-lr", 1e-4),
        ("lr-warmup-fraction", None),
        ("start-weight-decay", 0.01),
        ("end-weight-decay", 0.01),
    ):
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, default in (
        ("lr-decay-style", "cosine"),
        ("lr-wsd-decay-style", "exponential"),
        ("weight-decay-incr-style", "constant"),
    ):
        parser.add_argument(f"--{name}", default=default)
    for name in (
        "calculate-per-token-loss",
        "use-torch-fsdp2",
        "sequence-parallel",
        "log-params-norm",
        "log-num-zeros-in-grad",
        "log-throughput",
        "log-timers-to-tensorboard",
        "log-loss-scale-to-tensorboard",
        "log-world-size-to-tensorboard",
        "log-memory-to-tensorboard",
        "log-validation-ppl-to-tensorboard",
        "finetune",
        "no-load-optim",
        "exit-on-missing-checkpoint",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    for name in (
        "load",
        "save",
        "tokenizer-type",
        "tensorboard-dir",
        "wandb-project",
        "pretrained-checkpoint",
    ):
        parser.add_argument(f"--{name}")
    parser.add_argument(
        "--disable-gloo-process-groups", action="store_false", dest="enable_gloo_process_groups"
    )
    parser.add_argument("--data-cache-path")
    parser.add_argument("--mock-data", action="store_true")
    parser.add_argument("--rerun-mode", default="validate_results")
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_args()
    args.add_position_embedding = True
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return args
