"""A checkpoint that several members wrote is read in every layout, by torch and by Megatron."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import share_work
import torch
import worlds
from msgspec.structs import replace
from reshard_work import TRAIN, Layout
from stored_tensors import whole_tensor
from unicron.events.spec.job import Batch, Model, Optimizer, Train
from unicron.events.spec.model import Axes
from unicron.events.spec.parallelism import num_positions
from unicron.workers.host import checkpoint_index
from unicron.workers.training.checkpoint import checkpoint, share_files
from unicron.workers.training.checkpoint.folder import Folder
from unicron.workers.training.checkpoint.stored_state import StoredState
from unicron.workers.training.model import trainee as model
from unicron.workers.training.model import training_state
from unicron.workers.training.model.training_state import Numbers
from unicron.workers.training.process.history import History

BF16 = replace(TRAIN, precision="bf16")
DATA = Path(__file__).parents[2] / "data" / "checkpoint_version_1"
VERSION_1 = Train(
    model=Model(num_layers=1, hidden=8, num_heads=2, sequence=8),
    iterations=3,
    precision="bf16",
    batch=Batch(global_=4, micro=1),
    optimizer=Optimizer(lr=1e-2),
    output="unused",
    seed=7,
)
"""How the checkpoint in tests/data was trained."""
LOSSES_1 = [5.539720773696899, 5.566118955612183, 5.5384217500686646]


def world(layout: Layout) -> int:
    return num_positions(layout.axes)


def saved(folder: Path, train: Train, layout: Layout, lost: tuple[int, ...] = ()) -> str:
    path = str(folder / "gen-1" / "iter-1")
    worlds.run(world(layout), share_work.save, train, layout, path, lost)
    return path


def loads(path: str, train: Train, layout: Layout) -> None:
    wrong = worlds.run(world(layout), share_work.load, train, layout, path)
    assert not any(wrong), wrong


@pytest.mark.parametrize(
    ("train", "layout", "lost", "others"),
    [
        (
            TRAIN,
            Layout(Axes(tp=2, dp=2)),
            (),
            [Layout(Axes(dp=1)), Layout(Axes(pp=2, dp=2)), Layout(Axes(dp=3), "sharded")],
        ),
        (BF16, Layout(Axes(pp=2, dp=2)), (0,), [Layout(Axes(tp=2, dp=2)), Layout(Axes(dp=2))]),
        pytest.param(
            BF16,
            Layout(Axes(tp=2, dp=2), "sharded"),
            (),
            [Layout(Axes(dp=3), "mirrored"), Layout(Axes(tp=2, pp=2))],
            marks=pytest.mark.thorough,
        ),
        (
            TRAIN,
            Layout(Axes(dp=4), "mirrored"),
            (1, 3),
            [Layout(Axes(tp=2)), Layout(Axes(dp=4), "mirrored"), Layout(Axes(dp=2), "sharded")],
        ),
        (TRAIN, Layout(Axes(pp=2, chunks=3)), (), [Layout(Axes(pp=3)), Layout(Axes(dp=2))]),
    ],
)
def test_what_some_members_save_is_read_in_other_layouts(
    tmp_path: Path, train: Train, layout: Layout, lost: tuple[int, ...], others: list[Layout]
) -> None:
    path = saved(tmp_path, train, layout, lost)
    num_files = len(list(Path(path).glob("*.distcp")))
    assert num_files == world(layout) - len(lost)
    for other in others:
        loads(path, train, other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("saved"), BF16, Layout(Axes(tp=2, dp=2), "sharded"))


def test_torch_reads_it(whole: str) -> None:
    import torch.distributed.checkpoint as dcp

    stored = StoredState(whole)
    data: dict[str, Any] = {
        key: torch.empty_like(whole_tensor(stored, key)) for key in stored.kinds
    }
    data["numbers"] = {"precision": "", "step_version": 0, "losses": None}
    dcp.load(data, storage_reader=dcp.FileSystemReader(whole), no_dist=True)
    assert data.pop("numbers") == {"precision": "bf16", "step_version": 1, "losses": []}
    assert all(tensor.equal(whole_tensor(stored, key)) for key, tensor in data.items())
    assert {key.partition(".")[0] for key in data} == {"model", "master", "optimizer"}


def test_megatron_reads_it(whole: str, alone: Any) -> None:
    from megatron.core import dist_checkpointing as megatron
    from megatron.core.dist_checkpointing import ShardedTensor

    stored = StoredState(whole)
    assert megatron.check_is_distributed_checkpoint(whole)
    assert megatron.load_common_state_dict(whole) == {"iteration": 1}
    described = megatron.load_tensors_metadata(whole)
    assert {key: tuple(each.global_shape) for key, each in described.items()} == {
        key: tuple(whole_tensor(stored, key).shape) for key in stored.kinds
    }
    tensors = megatron.load_plain_tensors(whole)
    assert all(tensors[key].equal(whole_tensor(stored, key)) for key in stored.kinds)
    # Half of a tensor, as a tensor-parallel rank reads it.
    key = "model.decoder.layers.3.mlp.linear_fc1.weight"
    half = torch.empty_like(whole_tensor(stored, key).chunk(2)[1])
    read = megatron.load(
        {key: ShardedTensor.from_rank_offsets(key, half, (0, 1, 2))},
        whole,
        validate_access_integrity=False,
    )
    assert read[key].equal(whole_tensor(stored, key).chunk(2)[1])


# --- refused -------------------------------------------------------------------------------------
def refused(path: str, train: Train = BF16) -> str:
    """The error of reading it, one line; the state must be unchanged."""
    ((error, is_unchanged),) = worlds.run(1, share_work.refuse, train, Layout(Axes()), path)
    assert is_unchanged
    assert error
    assert "\n" not in error
    return str(error)


def _later(folder: Path) -> None:
    """Rewrite it as a checkpoint of a later format."""
    found = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = [info for index, info in found.storage_data.items() if index.fqn == "numbers.format"]
    with (folder / "later").open("wb") as file:
        torch.save(share_files.FORMAT_NUM + 1, file)
    place.relative_path, place.offset, place.length = "later", 0, (folder / "later").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def _with(what: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    """Change where the metadata has `what`, a number or a tensor."""

    def rewrite(folder: Path) -> None:
        found = pickle.loads((folder / ".metadata").read_bytes())
        for index, info in found.storage_data.items():
            if index.fqn.startswith(what):
                change(info)
        (folder / ".metadata").write_bytes(pickle.dumps(found))

    return rewrite


def _fifo(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.unlink()
    os.mkfifo(path)


def _endless(info: Any) -> None:
    info.relative_path, info.offset, info.length = "zero", 0, 1 << 40


def _sparse(folder: Path) -> None:
    _with("numbers", _endless)(folder)
    with (folder / "zero").open("wb") as file:
        file.truncate(1 << 40)


def _packed(folder: Path) -> None:
    """A number of which a few bytes become a gigabyte."""
    with zipfile.ZipFile(folder / "zero", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(256 << 20))

    def name(info: Any) -> None:
        info.relative_path, info.offset = "zero", 0
        info.length = (folder / "zero").stat().st_size

    _with("numbers", name)(folder)


class Evil:
    """A pickle that would make a folder."""

    def __reduce__(self) -> Any:
        return Path.mkdir, (Path("evil"),)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (
        shutil.rmtree,
        r"iter-1: the checkpoint is missing; submit it again with another",
    ),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), "it is not complete"),
    "cut metadata": (
        lambda folder: (folder / ".metadata").write_bytes(
            (folder / ".metadata").read_bytes()[:1000]
        ),
        r"its \.metadata cannot be read",
    ),
    "evil metadata": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Evil())),
        r"its \.metadata cannot be read: it would load pathlib\.Path\.mkdir|getattr",
    ),
    "a file elsewhere": (
        _with("numbers", lambda info: setattr(info, "relative_path", "../../../etc/passwd")),
        r"cannot be read: it names a file outside of the folder: '\.\./\.\./",
    ),
    "an absolute file": (
        _with("model", lambda info: setattr(info, "relative_path", "/dev/zero")),
        r"it names a file outside of the folder: '/dev/zero'",
    ),
    "a device": (
        lambda folder: (
            _with("numbers", _endless)(folder),
            (folder / "zero").symlink_to("/dev/zero"),
        ),
        r"its file zero: not a regular file",
    ),
    "a number of a terabyte": (_sparse, r"has 1099511627776 bytes, at most 67108864 hold it"),
    "a number that is packed": (_packed, r"cannot be read: it is packed"),
    "a negative place": (
        _with("model", lambda info: setattr(info, "offset", -5)),
        "begins before the file",
    ),
    "a pipe": (_fifo, r"its file __1_0\.distcp is cut: it has 0 bytes|not a regular file"),
    "no data": (lambda folder: (folder / "__3_0.distcp").unlink(), r"__3_0\.distcp is missing"),
    "cut data": (
        lambda folder: (folder / "__2_0.distcp").write_bytes(
            (folder / "__2_0.distcp").read_bytes()[:-9]
        ),
        r"__2_0\.distcp is cut: it has \d+ bytes of .*; submit it again with another",
    ),
    "no index": (
        lambda folder: (folder / "__1_0.index").unlink(),
        r"the index of its file __1_0\.distcp is missing",
    ),
    "later format": (_later, r"has format 3; this release reads formats up to 2; install"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_refused(
    whole: str, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "iter-1"
    shutil.copytree(whole, folder)
    change, says = DAMAGES[what]
    change(folder)
    assert re.search(says, refused(str(folder)))
    assert not (tmp_path / "evil").exists()


def test_altered_data_is_found(whole: str, tmp_path: Path) -> None:
    folder = tmp_path / "iter-1"
    shutil.copytree(whole, folder)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    index = checkpoint_index.read_index((folder / "__0_0.index").read_bytes())
    assert index is not None
    chunk = next(each for each in index.chunks if each.kind)
    data[chunk.begin_bytes + chunk.length_bytes // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    with pytest.raises(OSError, match=r"its file __0_0\.distcp was altered"):
        whole_tensor(StoredState(str(folder)), chunk.key)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden": 32}, r"is of another model: its \S+ is \S+ \S+, not \S+ \S+; name another"),
        ({"num_layers": 8}, r"is of another model: it has no \S+layers\.6\.\S+, nor \d+ other"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    whole: str, change: dict[str, int], says: str
) -> None:
    assert re.search(says, refused(whole, replace(BF16, model=replace(BF16.model, **change))))


def test_members_without_a_part_complete_nothing(tmp_path: Path) -> None:
    chunk = checkpoint_index.Chunk("model.a", "float32 4x2", (0, 0), (2, 2), 0, 9, 0)
    index = checkpoint_index.Index(share_files.FORMAT_NUM, 1, "__0_0.distcp", 9, [chunk])
    with pytest.raises(ValueError, match=r"its members have 4 of the 8 elements of model\.a"):
        share_files.complete(Folder(str(tmp_path / "iter-1"), "token"), [index])
    assert list(tmp_path.iterdir()) == []


# --- the format before ---------------------------------------------------------------------------
def test_a_checkpoint_of_one_member_stays_readable(alone: Any) -> None:
    trainee, history = model.build(VERSION_1, torch.device("cpu"), alone), History()
    assert checkpoint.load(str(DATA), trainee, history) == 3
    assert history.losses == LOSSES_1
    old = reference.read(DATA)
    live = training_state.tensors(trainee)
    assert all(tensor.equal(old[key]) for key, tensor in live.items())
    added = {"auxiliary_losses", "digests"}  # by later versions
    assert set(old) - set(live) == {
        f"numbers.{name}" for name in Numbers.__struct_fields__ if name not in added
    }
    assert (old["numbers.precision"], old["numbers.step_version"]) == ("bf16", 3)


def test_a_checkpoint_of_one_member_is_read_in_parts() -> None:
    layout = Layout(Axes(tp=2, dp=2), "sharded")
    for error, is_unchanged in worlds.run(
        world(layout), share_work.refuse, VERSION_1, layout, str(DATA)
    ):
        assert (error, is_unchanged) == ("", False), "it was not read"
