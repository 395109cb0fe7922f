"""Checkpoints at an fsspec URL: torch reads them, nothing is renamed, partial ones stay hidden."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import object_store
import pytest
from rank_driver import Drive, Twins
from reference import read
from unicron.events import object_storage
from unicron.events.errors import UsageError
from unicron.events.records.reports import CheckpointSaved, RankErrored, ReconfigureFailed
from unicron.events.records.statuses import WRONG_INPUT
from unicron.workers.agent.publish import PublishRefused, Superseded, publish
from unicron.workers.training.checkpoint import checkpoint, folder

ITERATIONS = 14


@pytest.fixture(params=["bucket", "file"])
def output(request: pytest.FixtureRequest, tmp_path: Path, bucket: Path) -> str:
    return {"bucket": "bucket://models/run", "file": f"file://{tmp_path}/run"}[request.param]


def started(drive: Drive, output: str, *ranks: int) -> Any:
    driver = drive(output=output, checkpoint_every=3, copy_every=0)
    driver.patch = object_store.KNOWN
    driver.start(*ranks)
    return driver


def published(output: str, report: CheckpointSaved, order: int = 5, at_s: float = 5.0) -> Any:
    """Publish the checkpoint; return what `latest` then contains."""
    publish(
        cluster="c",
        order=order,
        at_s=at_s,
        task=7,
        generation=report.generation,
        output=output,
        path=report.path,
    )
    with fsspec.open(f"{output}/latest") as file:
        return msgspec.json.decode(file.read())


def test_a_task_resumes_from_a_url_and_ends_as_its_twin(
    drive: Drive, twin: Twins, output: str
) -> None:
    """Both ranks die while the next checkpoint is half written. The partial one is never read."""
    driver = started(drive, output, 0, 1)
    waits = driver.hold(1, "forward", 4)
    driver.hold(0, "save_mid", 6)
    driver.form([0, 1])
    driver.wait(CheckpointSaved, 0)  # otherwise the next one may be skipped
    waits.unlink()
    driver.held(0, 6)
    (report,) = driver.told(CheckpointSaved)
    assert (report.path, report.final) == ("gen-1/iter-3", False)
    assert report.ckpt_bytes > driver.processes[0].ready.state_bytes
    assert published(output, report)["path"] == "gen-1/iter-3"
    half = CheckpointSaved(
        task=7, generation=1, step_version=6, path="gen-1/iter-6", ckpt_bytes=1, final=False
    )
    with pytest.raises(PublishRefused, match="gen-1/iter-6 is missing or incomplete"):
        published(output, half)
    driver.kill(0)
    driver.kill(1)

    again = started(drive, output, 0, 1)
    again.generation = 1
    first, second = again.form([0, 1], checkpoint="gen-1/iter-3").values()
    assert (first.step_version, first.origin, second.origin) == (3, "checkpoint", "checkpoint")
    again.finish([0, 1])
    assert sorted(again.losses()) == list(range(ITERATIONS))
    final = again.told(CheckpointSaved)[-1]
    assert final.final
    assert published(output, final, order=9, at_s=9.0)["path"] == f"gen-2/iter-{ITERATIONS}"
    store = object_storage.Store(output)
    assert "iter-6" not in store.names("gen-1"), "the partial checkpoint is removed"
    assert store.has("gen-1/iter-3/.metadata")
    assert twin(0.0).is_equal(f"{output}/{final.path}")


def test_latest_moves_only_forward(output: str, alone: Any) -> None:
    store = object_storage.Store(output)
    reports = [
        CheckpointSaved(
            task=7,
            generation=generation,
            step_version=3,
            ckpt_bytes=1,
            path=f"gen-{generation}/iter-3",
            final=False,
        )
        for generation in (1, 2)
    ]
    for one in reports:
        object_storage.Store(f"{output}/{one.path}").check_writable()
        store.write(f"{one.path}/.metadata", b"whole")
    assert published(output, reports[1], order=40)["path"] == "gen-2/iter-3"
    with pytest.raises(Superseded, match="order 40 has already published gen-2/iter-3"):
        published(output, reports[0], order=30)
    assert published(output, reports[0], order=2, at_s=6.0)["path"] == "gen-1/iter-3", "a new log"


def test_a_store_that_is_down_is_a_warning_and_training_goes_on(
    drive: Drive, bucket: Path, twin: Twins
) -> None:
    driver = started(drive, "bucket://models/run", 0)
    log = driver.processes[0].log
    driver.hold(0, "saving", 3)
    driver.form([0])
    driver.held(0, 3)
    (bucket / "down").touch()
    driver.hold(0, "forward", 10, micro_batch=0)
    driver.held(0, 10)
    driver.says(0, "checkpoint not saved")
    (bucket / "down").unlink()
    driver.hold(0, "forward", ITERATIONS)
    driver.finish([0])
    final = driver.told(CheckpointSaved)[-1]
    assert (final.step_version, final.final) == (ITERATIONS, True)
    assert log.read_text().count("training continues") == 1, "the warning is logged once"
    assert "bucket://models/run/gen-1/iter-3: Denied: 403: not now" in log.read_text()
    assert "checkpoints are saved again" in log.read_text()
    assert driver.told(RankErrored) == []
    assert twin(0.0).is_equal(f"bucket://models/run/{final.path}")


def test_an_fsspec_driver_keeps_its_connection_across_generations(
    drive: Drive, bucket: Path
) -> None:
    """A running save completes, the open connection still works, and a leaving rank can save."""
    driver = started(drive, "bucket://models/run", 0, 1)
    log = driver.processes[0].log
    path = driver.hold(0, "save_mid", 3)
    waits = driver.hold(1, "reduce", 5)
    driver.form([0, 1])
    driver.held(0, 3)
    driver.held(1, 5)
    driver.quiesce([0, 1], "now", waits)
    waits = driver.hold(1, "reduce", 7)
    driver.form([0, 1])
    driver.held(1, 7)
    path.unlink()
    report = driver.wait(CheckpointSaved, 0)
    assert (report.generation, report.path) == (1, "gen-1/iter-3")
    saved, held = driver.leave([0, 1], "now", waits)[0]
    assert isinstance(saved, CheckpointSaved)
    assert saved.path == f"gen-2/iter-{held.step_version}"
    assert "not saved" not in log.read_text()
    assert driver.told(RankErrored) == []


def test_a_failed_checkpoint_read_is_retried_in_the_next_generation(
    drive: Drive, bucket: Path, twin: Twins
) -> None:
    output, path, _ = one_checkpoint(drive, bucket)
    again = started(drive, output, 0)
    again.generation = 1
    (bucket / "down").touch()
    again.reconfigure([0], checkpoint=path)
    failed = again.wait(ReconfigureFailed, 0)
    (bucket / "down").unlink()
    assert failed.error == f"RuntimeError: {output}/{path}: Denied: 403: not now"
    assert again.told(RankErrored) == []
    (came,) = again.form([0], checkpoint=path).values()
    assert (came.step_version, came.origin) == (3, "checkpoint")
    again.finish([0])
    assert twin(0.0).is_equal(f"{output}/{again.told(CheckpointSaved)[-1].path}")


@pytest.mark.parametrize(
    ("is_cut", "says"),
    [
        (True, r"the checkpoint is damaged: its file \S+ is cut"),
        (False, r"the checkpoint is missing"),
    ],
)
def test_a_damaged_checkpoint_is_wrong_input(
    drive: Drive, bucket: Path, is_cut: bool, says: str
) -> None:
    output, path, data = one_checkpoint(drive, bucket)
    if is_cut:
        data.write_bytes(data.read_bytes()[:-9])
    else:
        for file in bucket.iterdir():
            file.unlink()
    again = started(drive, output, 0)
    again.generation = 1
    again.reconfigure([0], checkpoint=path)
    failed = again.wait(RankErrored, 0)
    assert (failed.error, failed.status) == ("UsageError", WRONG_INPUT)
    assert re.fullmatch(rf"{output}/{path}: {says} \(submit it again with .*\)", failed.text)


def one_checkpoint(drive: Drive, bucket: Path) -> tuple[str, str, Path]:
    """A run that ends after its first checkpoint: its output, the path of that, its data file."""
    output = "bucket://models/run"
    driver = started(drive, output, 0)
    driver.hold(0, "forward", 5, micro_batch=0)
    driver.form([0])
    report = driver.wait(CheckpointSaved, 0)
    driver.kill(0)
    (data,) = bucket.glob("*.distcp")
    return output, report.path, data


def test_a_store_that_is_not_writable_is_an_error_at_the_start(drive: Drive, bucket: Path) -> None:
    (bucket / "down").touch()
    driver = drive(output="bucket://models/run")
    driver.patch = object_store.KNOWN
    driver.launch(0)
    report = driver.wait(RankErrored, 0)
    assert report.error == "UsageError"
    assert report.text.startswith("train.output: bucket://models/run: denied: 403: not now (name")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://bucket/run", "the driver of s3:// is not installed.*Install s3fs"),
        ("nowhere://bucket/run", "fsspec knows no nowhere://.*available_protocols"),
    ],
)
def test_a_url_without_a_driver_is_a_one_line_error(url: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        checkpoint.check_output(url)
    assert "\n" not in f"{raised.value}{raised.value.hint}"
    assert re.search(says, f"{raised.value} {raised.value.hint}")


def fails_once(monkeypatch: pytest.MonkeyPatch, call: str, nth: int) -> list[int]:
    """Make the store refuse the `nth` `call` from now on. The result is empty until then."""
    original = getattr(object_store.Bucket, call)
    refused: list[int] = []
    calls = itertools.count()

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            refused.append(nth)
            raise object_store.Denied("503: slow down")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(object_store.Bucket, call, ask)
    return refused


@pytest.mark.parametrize("call", ["info", "ls"])
def test_no_store_error_makes_a_whole_checkpoint_look_partial(bucket: Path, call: str) -> None:
    output = "bucket://models/run"
    for nth in itertools.count():
        store = object_storage.Store(output)
        for name in ("iter-3/__0_0.distcp", "iter-3/.metadata", "iter-6/__0_0.distcp"):
            store.write(f"gen-1/{name}", b"written")
        with pytest.MonkeyPatch.context() as patch:
            refused = fails_once(patch, call, nth)
            folder.clear(output, 2)
        assert store.names("gen-1/iter-3") == [".metadata", "__0_0.distcp"], nth
        if not refused:
            break
    assert nth > 0, "the store received no call"
    assert store.names("gen-1") == ["iter-3"], "the partial checkpoint is removed"


def test_removing_from_an_unreachable_store_is_an_error(bucket: Path) -> None:
    store = object_storage.Store("bucket://models/run")
    store.write("gen-1/iter-3/.metadata", b"whole")
    for nth in (0, 1):
        with pytest.MonkeyPatch.context() as patch:
            refused = fails_once(patch, "info", nth)
            with pytest.raises(object_storage.Unreachable, match="Denied: 503: slow down"):
                store.remove("gen-1/iter-3")
            assert refused == [nth]
    assert not store.has("gen-1/iter-3/.metadata"), ".metadata is removed first"


def test_a_save_that_fails_halfway_leaves_nothing(output: str) -> None:
    """Two members write in parts. The attempt before has other files, and stays until the end."""
    import torch
    from unicron.workers.host import checkpoint_index
    from unicron.workers.training.checkpoint import share_files
    from unicron.workers.training.model.training_state import Numbers
    from unicron.workers.training.recovery.resharding import Region, Shard

    def pieces(value: float, place: int, *, fails: bool) -> Iterator[tuple[Shard, torch.Tensor]]:
        for number in range(8):
            if fails and number == 4:
                raise RuntimeError("the store broke off")
            yield (
                Shard(f"model.{number}", "float32 100", Region((50 * place,), (50,))),
                torch.full((50,), value),
            )

    def write(token: str, value: float, place: int, *, fails: bool = False) -> None:
        share_files.write_share(
            folder.Folder(url, token),
            place,
            3,
            pieces(value, place, fails=fails),
            {} if place else share_files.plain(numbers),
        )

    def complete(token: str) -> int:
        target = folder.Folder(url, token)
        found = [
            checkpoint_index.read_index(target.read(target.index_name(place))) for place in (0, 1)
        ]
        return share_files.complete(target, [index for index in found if index is not None])

    numbers = Numbers(
        precision="fp32",
        step_version=3,
        consumed_samples=0,
        scheduled_samples=0,
        adam_step=0.0,
        loss_scales=[],
        first_loss=0,
        losses=[0.5],
        step_s=[0.1],
    )
    url = f"{output}/gen-1/iter-3"
    with pytest.raises(RuntimeError, match="the store broke off"):
        write("one", 1.0, 0, fails=True)
    folder.Folder(url, "one").discard()
    assert object_storage.Store(url).names() == []
    for place in (1, 0):
        write("two", 2.0, place)
    num_bytes = complete("two")
    assert num_bytes > 8 * 400
    assert read(url)["model.7"].eq(2).all()
    write("three", 3.0, 0)
    assert read(url)["model.7"].eq(2).all(), "the checkpoint before is in force"
    folder.Folder(url, "three").discard()
    assert read(url)["model.7"].eq(2).all()
    for place in (0, 1):
        write("four", 4.0, place)
    assert complete("four") == num_bytes + 2, "the token is longer"
    assert read(url)["model.7"].eq(4).all()
    assert not [name for name in object_storage.Store(url).names() if "two" in name]


def test_a_store_that_refuses_a_connection_is_no_wrong_input() -> None:
    """It may be back within minutes: the task has the time of faults that can pass."""
    with pytest.raises(ConnectionRefusedError):
        checkpoint.check_output("ftp://127.0.0.1:9/run")
