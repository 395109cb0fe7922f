"""Old checkpoints are removed once a newer one is published and was read back."""

from __future__ import annotations

import os
import shutil
import threading
import zlib
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from unicron.events.object_storage import COMPLETE_MARK
from unicron.workers.agent import removal
from unicron.workers.agent.removal import NotRemoved, remove_old
from unicron.workers.host import checkpoint_index, output_owner
from unicron.workers.host.checkpoint_index import Chunk, Index
from unicron.workers.host.output_owner import NotOwner, Owner

PATHS = tuple(f"gen-{1 + number // 3}/iter-{number}" for number in range(1, 6))
OLD, NEW = PATHS[:3], PATHS[-1]
DATA = os.urandom(5_000)


def write(folder: Path, parts: int = 2) -> None:
    """A checkpoint of as many members."""
    folder.mkdir(parents=True)
    for place in range(parts):
        chunks = [
            Chunk("w", "float32 1", (0,), (1,), begin, 1000, zlib.crc32(DATA[begin : begin + 1000]))
            for begin in range(0, 5000, 1000)
        ]
        index = Index(2, 5, f"__{place}_0.distcp", len(DATA), chunks)
        (folder / index.file).write_bytes(DATA)
        (folder / f"__{place}_0.index").write_bytes(msgspec.msgpack.encode(index))
    (folder / COMPLETE_MARK).write_bytes(b"metadata")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    for path in PATHS:
        write(folder / path)
    (folder / "latest").symlink_to(NEW)
    output_owner.claim(folder, owner_of(folder))
    return folder


def owner_of(output: Path | str, task: int = 3) -> Owner:
    return Owner(cluster="c", cluster_id="1", task=task, output=str(output))


def there(output: Path) -> list[str]:
    return sorted(str(path.relative_to(output)) for path in output.glob("gen-*/*"))


def remove(output: Path, old: tuple[str, ...] = OLD, path: str = NEW, task: int = 3) -> list[str]:
    return remove_old(output=str(output), path=path, old=old, owner=owner_of(output, task))


def test_those_that_the_order_names_go_and_no_others(output: Path) -> None:
    (output / "gen-1/mine.txt").write_text("of the user")
    assert remove(output) == list(OLD)
    assert there(output) == ["gen-1/mine.txt", *PATHS[3:]]
    assert remove(output) == [], "a repeated order"
    (output / "gen-1/mine.txt").unlink()
    assert remove(output, PATHS[3:4]) == [PATHS[3]]
    assert sorted(one.name for one in output.glob("gen-*")) == ["gen-1", "gen-2"]


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("cut", "its file __1_0.distcp has 4000 bytes of 5000"),
        ("flip", "its file __1_0.distcp was altered: a checksum is wrong"),
        ("index", "the index of its file __1_0.distcp is missing or cut"),
        ("half index", "the index of its file __1_0.distcp is missing or cut"),
        ("mark", "it has no .metadata"),
        ("empty", "it has no .metadata"),
        ("gone", "it has no .metadata"),
    ],
)
def test_nothing_goes_before_the_newer_one_was_read_back(output: Path, harm: str, why: str) -> None:
    new = output / NEW
    data, index = new / "__1_0.distcp", new / "__1_0.index"
    if harm == "cut":
        data.write_bytes(DATA[:4000])
    elif harm == "flip":
        data.write_bytes(DATA[:4321] + bytes([DATA[4321] ^ 1]) + DATA[4322:])
    elif harm == "index":
        index.unlink()
    elif harm == "half index":
        index.write_bytes(index.read_bytes()[:20])
    elif harm == "mark":
        (new / COMPLETE_MARK).unlink()
    else:
        shutil.rmtree(new)
        if harm == "empty":
            new.mkdir()
    before = there(output)
    with pytest.raises(NotRemoved) as refused:
        remove(output)
    assert str(refused.value) == f"{NEW} cannot be read back: {why}"
    assert there(output) == before


@pytest.mark.parametrize("name", ["../out", "gen-1", "/etc", "gen-1/iter-1/../..", "", NEW])
def test_only_old_checkpoints_inside_the_folder_are_removed(output: Path, name: str) -> None:
    before = there(output)
    with pytest.raises(NotRemoved, match="is not an old checkpoint inside the output folder"):
        remove(output, (name,))
    assert there(output) == before


def test_links_are_not_followed_and_what_latest_names_stays(output: Path, tmp_path: Path) -> None:
    """By mistake an order might name what a person has moved away, or has pointed `latest` to."""
    elsewhere = tmp_path / "elsewhere"
    (output / OLD[0]).rename(elsewhere)
    (output / OLD[0]).symlink_to(elsewhere)
    (output / "latest").unlink()
    (output / "latest").symlink_to(OLD[1])
    assert remove(output) == [OLD[2]]
    assert (elsewhere / COMPLETE_MARK).exists()
    assert set(there(output)) == {OLD[0], OLD[1], *PATHS[3:]}


def test_a_removal_that_was_cut_short_is_ended_by_the_next(output: Path) -> None:
    left = output / f"{OLD[0]}{removal.REMOVED}"
    (output / OLD[0]).rename(left)
    (left / COMPLETE_MARK).unlink()
    assert remove(output) == list(OLD)
    assert there(output) == list(PATHS[3:])


def test_someone_empties_the_folder_meanwhile(output: Path) -> None:
    """A hundred times, at any moment: no error but the one that the newer one is gone."""
    spare = output.with_name("spare")
    shutil.copytree(output, spare, symlinks=True)
    for number in range(100):
        emptying = threading.Timer(number * 2e-5, shutil.rmtree, (output, True))
        emptying.start()
        with suppress(NotRemoved, FileNotFoundError):  # the newer one is gone, or one of its files
            remove(output)
        emptying.join()
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(spare, output, symlinks=True)


def test_another_tasks_folder_is_left_alone(output: Path) -> None:
    before = there(output)
    with pytest.raises(NotOwner, match="is the folder of task 3"):
        remove(output, task=4)
    assert there(output) == before


def test_at_a_url(output: Path) -> None:
    url = f"file://{output}"
    assert remove_old(output=url, path=NEW, old=OLD, owner=owner_of(url)) == list(OLD)
    assert there(output) == list(PATHS[3:])
    (output / NEW / "__0_0.index").unlink()
    with pytest.raises(NotRemoved):
        remove_old(output=url, path=NEW, old=PATHS[3:4], owner=owner_of(url))


def test_the_whole_of_a_large_piece_is_read(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_index, "PIECE_BYTES", 7)
    assert checkpoint_index.damage(str(output / NEW)) == ""
