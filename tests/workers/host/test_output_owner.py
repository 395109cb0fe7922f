"""The owner of an output folder: one task, by whatever name it reaches the folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import refusing_files
from unicron.events.errors import UsageError
from unicron.workers.agent.publish import publish
from unicron.workers.host import output_owner
from unicron.workers.host.output_owner import NotOwner, Owner, claim
from unicron.workers.training.checkpoint import checkpoint

CHILD_S_MAX = 120.0
CLAIM = """
import sys, time
from pathlib import Path
from unicron.workers.host.output_owner import NotOwner, Owner, claim
folder, task = sys.argv[1], int(sys.argv[2])
while time.time() < float(sys.argv[3]):
    pass
try:
    claim(Path(folder), Owner(cluster="c", cluster_id="1", task=task, name="t", output=folder))
    print("mine")
except NotOwner as error:
    print(error)
"""


def task(number: int, output: Path | str, cluster_id: str = "1", name: str = "") -> Owner:
    return Owner(
        cluster="default",
        cluster_id=cluster_id,
        task=number,
        name=name or f"job{number}",
        output=str(output),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "one").mkdir()
    return tmp_path / "one"


@pytest.fixture
def link(folder: Path) -> Path:
    folder.with_name("two").symlink_to("one")
    return folder.with_name("two")


@pytest.mark.parametrize("kind", ["links", "nolinks"])
def test_one_of_many_that_begin_at_once_has_the_folder(tmp_path: Path, kind: str) -> None:
    environment = {**os.environ}
    if kind == "nolinks":
        if not shutil.which("cc"):
            pytest.skip("needs a C compiler")
        environment["LD_PRELOAD"] = str(refusing_files.compiled(tmp_path))
    folder = tmp_path / kind / "out"
    folder.mkdir(parents=True)
    names = [str(folder)]
    for number in range(1, 4):
        other = folder.with_name(f"by-{number}")
        other.symlink_to("out")
        names.append(str(other))
    start_s = str(time.time() + 1.5)
    claiming = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", CLAIM, name, str(number), start_s],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number, name in enumerate(names, 1)
    ]
    said = [one.communicate(timeout=CHILD_S_MAX)[0].strip() for one in claiming]
    winner = said.index("mine") + 1
    for number, (name, words) in enumerate(zip(names, said, strict=True), 1):
        if number != winner:
            assert words == (
                f"{name} is the folder of task {winner} (t), which names it {names[winner - 1]}"
            )
    assert os.listdir(folder) == [".owner.json"]


def test_a_later_task_takes_its_folder_over_and_the_former_one_writes_no_more(
    folder: Path,
) -> None:
    former, later = task(3, folder, name="job"), task(9, f"{folder}/./", name="job")
    claim(folder, former)
    claim(folder, former, takes_over=False)
    claim(folder, later)
    claim(folder, later, takes_over=False)
    with pytest.raises(NotOwner, match=r"is the folder of task 9 \(job\)$"):
        claim(folder, former, takes_over=False)
    assert output_owner.read(folder) == later


def test_the_second_name_of_a_folder_is_refused(folder: Path, link: Path) -> None:
    first = task(3, folder)
    claim(folder, first)
    with pytest.raises(NotOwner) as refused:
        claim(link, task(4, link))
    assert str(refused.value) == (f"{link} is the folder of task 3 (job3), which names it {folder}")
    assert refused.value.hint == (
        f"name another output; if that task has ended, write {folder}, or remove {link}/.owner.json"
    )
    assert output_owner.read(folder) == first
    with pytest.raises(UsageError) as wrong:
        checkpoint.check_output(str(link), "loop.output", task(4, link))
    assert str(wrong.value) == f"loop.output: {refused.value}"


def test_another_cluster_of_the_same_name_is_refused(folder: Path) -> None:
    claim(folder, task(3, folder))
    for number in (3, 4):
        with pytest.raises(NotOwner) as refused:
            claim(folder, task(number, folder, cluster_id="2"))
        assert str(refused.value) == (
            f"{folder} is the folder of task 3 (job3) of another cluster (default)"
        )
        assert refused.value.hint.endswith(f"if that task has ended, remove {folder}/.owner.json")
    (folder / ".owner.json").unlink()
    claim(folder, task(4, folder, cluster_id="2"))


@pytest.mark.parametrize("left", ["", '{"cluster": "defa'])
def test_a_cut_owner_file(folder: Path, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_owner, "CUT_S_MAX", 0.2)
    file = folder / ".owner.json"
    file.write_text(left)
    with pytest.raises(NotOwner) as refused:
        claim(folder, task(3, folder))
    assert str(refused.value) == f"{file} is damaged: whose folder it is cannot be known"
    assert refused.value.hint == "remove it, if no other task writes there"
    # The last publication is a second source.
    published = {"cluster": "default", "order": 7, "task": 3, "generation": 1, "path": "x"}
    (folder / ".published.json").write_text(json.dumps(published))
    with pytest.raises(NotOwner, match=r"is the folder of task 3$"):
        claim(folder, task(4, folder), takes_over=False)
    claim(folder, task(3, folder), takes_over=False)
    assert output_owner.read(folder) == task(3, folder), "it is whole again"


def test_a_folder_that_someone_empties_stays_that_of_its_task(folder: Path) -> None:
    claim(folder, task(3, folder))
    shutil.rmtree(folder)
    claim(folder, task(3, folder), takes_over=False)
    assert output_owner.read(folder) == task(3, folder)


def test_only_the_owner_publishes(folder: Path, link: Path) -> None:
    (folder / "gen-1/iter-5").mkdir(parents=True)

    def give(number: int, output: Path, cluster_id: str = "1") -> None:
        publish(
            cluster="default",
            cluster_id=cluster_id,
            order=20 + number,
            at_s=float(number),
            task=number,
            generation=1,
            output=str(output),
            path="gen-1/iter-5",
        )

    claim(folder, task(3, folder))
    give(3, folder)
    before = (folder / ".published.json").read_bytes()
    for number, cluster_id in ((4, "1"), (3, "2")):
        with pytest.raises(NotOwner, match=r"is the folder of task 3 \(job3\)"):
            give(number, link, cluster_id)
    assert (folder / ".published.json").read_bytes() == before
    give(3, link)
