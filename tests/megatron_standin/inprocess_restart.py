"""Disabled, as without --inprocess-restart."""


def maybe_wrap_for_inprocess_restart(pretrain):
    return pretrain, None
