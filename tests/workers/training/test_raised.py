"""A rank raises in the middle of training: it says why, and its peers whom they lost."""

from __future__ import annotations

import re
from collections.abc import Callable

from rank_driver import Driver
from unicron.events.records.reports import CollectiveFailed, RankErrored
from unicron.events.records.statuses import CONNECTION_REFUSED, CONNECTION_RESET
from unicron.workers.diagnosis.classifier import classify

FAILS_IN_ITS_FORWARD = """
from unicron.workers.training.model import trainee as model
right, calls = model.TrainingModel.loss, []
def fails(self, tokens):
    calls.append(1)
    if len(calls) == 7:
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError as error:
            raise ValueError("the batch could not be made") from error
    return right(self, tokens)
model.TrainingModel.loss = fails
"""


def test_a_rank_that_raises_is_known_by_its_cause_and_its_peers_by_whom_they_lost(
        drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.start(0, 2)
    driver.patch = FAILS_IN_ITS_FORWARD
    driver.start(1)
    driver.form([0, 1, 2])
    told = driver.wait(RankErrored, 1)
    assert (told.error, told.status, told.second_hand) == (
        "ValueError", CONNECTION_REFUSED, False)
    assert (told.generation, told.iteration) == (1, 1)
    assert told.rule
    assert "ConnectionRefusedError: [Errno 111] Connection refused" in told.text
    assert told.text.endswith("ValueError: the batch could not be made\n")
    assert driver.processes.pop(1).popen.wait(20) == 1, driver.story()
    alone = driver.left_by_themselves([0, 2])
    assert alone, "the fault itself has one leave"
    for rank in alone:
        failed = driver.wait(CollectiveFailed, rank)
        assert failed.status == CONNECTION_RESET, failed
        verdict = classify(failed.error)
        assert verdict.second_hand
        assert (failed.rule, failed.peer) == (verdict.rule, verdict.peer)
        named = re.search(r"\[([\d.]+)\]:(\d+)", failed.error)  # not in all that gloo says
        assert failed.peer == (":".join(named.groups()) if named is not None else ""), failed.error
    driver.form([0, 2], progress_from=1)
    driver.finish([0, 2])
