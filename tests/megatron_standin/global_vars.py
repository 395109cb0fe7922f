"""Arguments, timers and the writer; one set per process."""

from contextlib import nullcontext
from types import SimpleNamespace

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


def get_tokenizer():
    return SimpleNamespace(vocab_size=get_args().padded_vocab_size)


def get_tensorboard_writer():
    return None


def set_global_variables(args):
    global _ARGS
    assert _ARGS is None, "args is already initialized."
    _ARGS = args
