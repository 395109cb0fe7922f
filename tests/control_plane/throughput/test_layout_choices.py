"""`unicron submit --dry-run`: what each number of slots gives, from the spec alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from cli_process import refused, unicron
from decider import Driver, task_of
from described_jobs import MODEL, submitted
from described_jobs import job as command
from two_tasks import train
from unicron.cli.cluster.client import Refused, Unreachable
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import submit_dry_run
from unicron.control_plane.api import dry_run, requests
from unicron.control_plane.decide.memory_checkpoints import node_bytes
from unicron.control_plane.state.cluster import ClusterState, encode_state
from unicron.control_plane.throughput import table, training_layouts
from unicron.control_plane.throughput.layout_choices import CHOICES_NUM_MAX, choices, shown
from unicron.control_plane.throughput.memory import KEPT_BYTES, RESERVED_BYTES, in_gib
from unicron.control_plane.throughput.state_size import seat_bytes
from unicron.events.errors import SpecError, UsageError
from unicron.events.spec.job import JobSpec, Loop, parse
from unicron.events.spec.model import Axes

EXAMPLES = Path(__file__).parents[3] / "deploy" / "examples"
LARGE = {
    **MODEL,
    "num_layers": 40,
    "hidden": 4096,
    "num_heads": 32,
    "global_batch": 64,
    "recompute": "none",
}
"""8.3 B parameters: four A100 hold it, and two only without the kept sum."""


def loop(
    model: dict[str, Any] | None = None,
    slots: dict[str, Any] | None = None,
    *,
    kept_sum: bool = True,
    **parallel: Any,
) -> dict[str, Any]:
    parallel = parallel or {"tensor": [1, 2, 4]}
    return {
        "apiVersion": "unicron/v1",
        "name": "own",
        "slots": slots or {"min": 1, "max": 16},
        "command": ["true"],
        "heal": "in-memory",
        "loop": {
            "micro_batches": 64,
            "iterations": 10,
            "output": "/out",
            "kept_sum": kept_sum,
            "parallel": parallel,
            "model": {**LARGE, **(model or {})},
        },
    }


def described(spec: JobSpec) -> Loop:
    assert spec.loop is not None
    return spec.loop


def test_a_loop_has_the_fastest_layout_that_fits() -> None:
    spec = parse(loop())
    found = choices(spec)
    assert [one.slots for one in found.choices] == [4, 8, 12, 16]
    assert found.choices[0].axes == Axes(tp=4)
    for one in found.choices:
        assert one.memory_bytes is not None
        assert one.memory_bytes <= found.capacity_bytes
        assert training_layouts.layout_within(described(spec), one.slots) == one.axes
    roomy = choices(parse(loop({"gpu": "B200-180"}, kept_sum=False)))
    assert roomy.choices[0].axes == Axes(), "it has room on one GPU, and needs no other"
    assert found.choices[0].notes[1].startswith("memory binds: TP 2 x DP 2 needs ")


def test_rates_of_a_described_loop_are_absolute() -> None:
    spec = parse(loop())
    found = {one.slots: one.rate_flops for one in choices(spec).choices}
    rates = table.table(1, spec)
    assert rates.sizes == tuple(found)
    assert rates.rates_flops == pytest.approx(list(found.values()), rel=1e-9)
    assert rates.rates_flops[0] > 4e14, "a third of the peak of four A100"


def test_the_kept_sum_is_charged_where_something_heals() -> None:
    spec = parse(loop())
    (heals, *_), (without, *_) = choices(spec).choices, choices(parse(loop(kept_sum=False))).choices
    (restarts, *_) = choices(parse(command({"num_layers": 8}))).choices
    assert heals.kept_bytes == pytest.approx(KEPT_BYTES * choices(spec).num_parameters / 4)
    assert without.kept_bytes == restarts.kept_bytes == 0
    assert heals.memory_bytes is not None
    assert without.memory_bytes is not None
    assert without.slots < heals.slots, "the layout that has room without the kept sum"
    with pytest.raises(SpecError, match=r"model\.kept_sum: is for a task that heals in memory"):
        parse(command({"kept_sum": True}))


def test_a_train_task_shows_its_memory_and_no_gpu() -> None:
    found = choices(train("own", 1.0, {}))
    assert (found.gpu, found.capacity_bytes) == ("", 0)
    assert all(one.kept_bytes and one.iteration_s is None for one in found.choices)
    assert found.choices[0].speed == 1
    memory_bytes = found.choices[0].memory_bytes
    assert memory_bytes is not None
    assert memory_bytes < RESERVED_BYTES, "nothing is charged for CUDA where no GPU is named"
    (named, *_) = choices(parse(loop())).choices
    needs = training_layouts.memory_on(described(parse(loop())), named.axes or Axes())
    assert needs is not None
    assert needs.total - RESERVED_BYTES == pytest.approx(
        needs.weights + needs.gradients + needs.optimizer + needs.activations + needs.kept
    )


def test_a_command_without_a_model_has_no_choice() -> None:
    plain = command()
    del plain["model"]
    found = choices(parse(plain))
    assert (found.choices, found.refused) == ((), "")


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (loop(tensor=[3]), "loop.parallel.tensor: 3 does not divide num_heads 32"),
        (
            loop({"num_query_groups": 2}, tensor=[4]),
            "loop.parallel.tensor: 4 does not divide num_query_groups 2",
        ),
        (loop(tensor=[16]), "loop.parallel.tensor: 16 is more than the 8 GPUs of a node"),
        (loop(pipeline=[3]), "loop.parallel.pipeline: 3 does not divide num_layers 40"),
        (loop(pipeline=[4], chunks=3), "loop.parallel.pipeline: 4 with 3 chunks does not divide"),
        (loop({"global_batch": 65}), "loop.model.global_batch: 65 is not a multiple of"),
        (
            loop({"micro_batch": 4}),
            "loop.model.micro_batch: is 4, but 64 samples in 64 micro-batches",
        ),
        (loop({"recompute": "any"}), "loop.model.recompute: is missing"),
        (loop({"kept_sum": True}), "loop.model.kept_sum: is loop.kept_sum"),
        (loop({"hidden": 4097}), "loop.model.hidden: 4097 is not divisible"),
        (loop() | {"model": MODEL}, "model: is for a command that is only restarted"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(job: dict[str, Any], why: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(job)
    assert str(error.value).startswith(why)
    assert error.value.hint


def test_a_model_without_room_is_refused_with_figures() -> None:
    spec = loop(tensor=[1, 2])
    why = "no layout of loop.parallel fits into 79.2 GiB: TP 2 x DP 1 needs "
    assert choices(parse(spec)).refused.startswith(why)
    with pytest.raises(requests.Refusal) as error:
        requests.submit(ClusterState(), parse(spec), "")
    assert (error.value.status, str(error.value).startswith(why)) == (422, True)
    assert submitted(loop()).modelled is None, "its layouts are those of loop.parallel"


def test_few_numbers_of_slots_are_shown() -> None:
    assert list(shown(range(1, CHOICES_NUM_MAX + 1))) == list(range(1, CHOICES_NUM_MAX + 1))
    assert list(shown(range(6, 101))) == [6, 12, 24, 48, 96, 100]
    assert list(shown([])) == []


# --- the command ---
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_example_has_a_page(file: Path, tmp_path: Path) -> None:
    result = unicron("submit", str(file), "--dry-run", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "no cluster runs here" in result.stdout
    found = json.loads(
        unicron("submit", str(file), "--dry-run", "-o", "json", folder=tmp_path).stdout
    )
    assert found["plan"] is None
    assert all(one["axes"] for one in found["choices"])


def test_the_page_of_70_b(tmp_path: Path) -> None:
    result = unicron("submit", str(EXAMPLES / "megatron-70b.yaml"), "--dry-run", folder=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("job        llama-70b, 32 to 512 in steps of 32 slots; 69 G param")
    (row,) = [line for line in lines if line.startswith("   64  ")]
    assert row.split("  ")[1:3] == [" 64", "TP 8 x PP 4 x DP 2"]
    assert row.endswith("56.5 GiB   8.1 GiB  449.7 GiB"), "2 x 2 x 899 GiB on eight nodes"
    (row,) = [line for line in lines if line.startswith("   32  ")]
    assert row.endswith("  899.4 GiB")
    text = " ".join(result.stdout.split())
    assert text.count("a lost rank costs up to 10 iterations; there is no second replica") == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": {"min": 8, "max": 8}, "tensor": [4]}, ()),
        (
            {"slots": {"min": 4, "max": 4}, "tensor": [4]},
            ("a lost rank costs up to 10 iterations; there is no second replica",),
        ),
        (
            {
                "slots": {"min": 8, "max": 8},
                "tensor": [4],
                "optimizer": "sharded",
                "mirror": "never",
            },
            ("a lost rank costs up to 10 iterations; each rank has a shard of its own",),
        ),
        (
            {"slots": {"min": 4, "max": 4}, "tensor": [4], "copy_every": 0, "checkpoint_every": 5},
            (
                "a lost rank costs all iterations since the last checkpoint; "
                "there is no second replica",
            ),
        ),
        (
            {"slots": {"min": 4, "max": 4}, "tensor": [4], "copy_every": 0},
            ("a lost rank costs all iterations; there is no second replica",),
        ),
    ],
)
def test_a_row_says_what_a_lost_rank_costs(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    every = {
        name: changes.pop(name) for name in ("copy_every", "checkpoint_every") if name in changes
    }
    spec = loop(**changes)
    spec["loop"] |= every
    (row,) = choices(parse(spec)).choices
    assert tuple(note for note in row.notes if "a lost rank" in note) == words
    assert (row.node_copies_bytes is None) == ("copy_every" in every)
    if row.node_copies_bytes is not None:
        assert row.node_copies_bytes == choices(parse(spec)).copies_bytes / 2


@pytest.mark.parametrize(("size", "cost"), [(1, False), (4, True)])
def test_the_page_says_what_keeping_the_tensor_parallel_size_costs(size: int, cost: bool) -> None:
    spec = loop({"num_layers": 2}, {"min": 8, "max": 8}, tensor=[size])
    spec["loop"] |= {"reproducible": "bitwise", "digest_every": 10}
    job = parse(spec)
    text = " ".join("\n".join(submit_dry_run.page(job, choices(job), "8")).split())
    assert (
        "sums reproducible: bitwise, if the script can; a digest of the state every 10 "
        f"iterations; tensor parallel stays {size}"
    ) in text
    assert (", so slots beyond a multiple of it train nothing" in text) == cost
    del spec["loop"]["reproducible"], spec["loop"]["digest_every"]
    job = parse(spec)
    assert "sums " not in "".join(submit_dry_run.page(job, choices(job), "8"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": [3]}, "3 does not divide num_heads 32"),
        ({"tensor": [1]}, "no layout of loop.parallel fits into 79.2 GiB"),
    ],
)
def test_a_refused_job_is_one_line_with_a_hint(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(loop(**changes)))
    refused(unicron("submit", "job.yaml", "--dry-run", folder=tmp_path), words)


class Told:
    """A control plane that answers dry runs from a driver's state."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def get(self, path: str, limit_s: float = 10.0) -> Any:
        return {"nodes": []}

    def dry_run(self, change: Any) -> Any:
        found = dry_run.run_dry(
            encode_state(self.driver.state), msgspec.convert(change, dry_run.Change)
        )
        return {**msgspec.to_builtins(found), "took_s": 0.001}


@pytest.mark.nodes(3)
def test_a_cluster_adds_the_plan(
    d: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submit_dry_run, "connect", lambda state, url=None: Told(d))
    (tmp_path / "job.yaml").write_text(json.dumps(command()))
    submit_dry_run.dry_run(StateDir(tmp_path), None, tmp_path / "job.yaml", as_json=False)
    shown = capsys.readouterr().out
    assert "DP 6" in shown
    assert "dry run, input " in shown
    assert "0 -> 6" in shown
    submit_dry_run.dry_run(StateDir(tmp_path), None, tmp_path / "job.yaml", as_json=True)
    assert json.loads(capsys.readouterr().out)["plan"]["planned"]
    assert not d.state.tasks, "nothing is submitted"


@pytest.mark.nodes(3)
def test_the_layouts_are_shown_where_the_cluster_refuses_the_job(
    d: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refuses(Told):
        def dry_run(self, change: Any) -> Any:
            raise Refused(422, "the job needs at least 8 slots", "add a node")

    monkeypatch.setattr(submit_dry_run, "connect", lambda state, url=None: Refuses(d))
    (tmp_path / "job.yaml").write_text(json.dumps(command()))
    for as_json in (False, True):
        submit_dry_run.dry_run(StateDir(tmp_path), None, tmp_path / "job.yaml", as_json=as_json)
        shown = capsys.readouterr().out
        if not as_json:
            assert "DP 6" in shown
            assert " ".join(shown.split()).endswith(
                "plan this cluster would refuse the job now: the job needs at least 8 slots (add a "
                "node)"
            )
            continue
        found = json.loads(shown)
        assert found["choices"]
        assert (found["plan"], found["plan_refused"]) == (None, "the job needs at least 8 slots")
    unknown = mock.Mock(side_effect=Refused(401, "no token", "set it"))
    monkeypatch.setattr(Refuses, "dry_run", unknown)
    with pytest.raises(Refused, match="no token"):
        submit_dry_run.dry_run(StateDir(tmp_path), None, tmp_path / "job.yaml", as_json=False)


@pytest.mark.nodes(3)
def test_a_missing_data_file_is_told_before_the_layouts(
    d: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "{apiVersion: unicron/v1, name: a, train: {iterations: 9, output: out, "
        "data: [/absent.txt]}}"
    )
    alone = unicron("submit", str(path), "--dry-run", folder=tmp_path)
    assert alone.returncode == 0
    assert alone.stderr.startswith("note: train.data[0]: /absent.txt is not a readable file on ")

    class OnThisHost(Told):
        def get(self, path: str, limit_s: float = 10.0) -> Any:
            return {"nodes": [{"host": "127.0.0.1", "contact": "heard"}]}

    monkeypatch.setattr(submit_dry_run, "connect", lambda state, url=None: OnThisHost(d))
    monkeypatch.delenv("UNICRON_URL", raising=False)
    with pytest.raises(UsageError, match=r"/absent\.txt is not a readable file"):
        submit_dry_run.dry_run(StateDir(tmp_path), None, path, as_json=False)
    assert capsys.readouterr().out == ""


@pytest.mark.nodes(3)
def test_a_job_without_a_layout_is_refused_in_json_too(
    d: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(loop(tensor=[1])))
    with pytest.raises(UsageError) as error:
        submit_dry_run.dry_run(StateDir(tmp_path), None, tmp_path / "job.yaml", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["refused"] in str(error.value)
    assert found["refused"].startswith("no layout of loop.parallel fits")


def test_the_memory_of_copies_is_shown_and_compared_with_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    d = Driver(nodes=0)
    for number in range(3):
        d.join(f"n{number}", slots=2, copies_bytes_max=64 << 20)
    job = {
        "apiVersion": "unicron/v1",
        "name": "alpha",
        "slots": {"min": 6, "max": 6},
        "train": {"iterations": 50, "output": "/srv/alpha", "batch": {"global": 24, "micro": 2}},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    monkeypatch.setattr(submit_dry_run, "connect", lambda state, url=None: Told(d))

    def shown() -> tuple[str, dict[str, Any], int]:
        submit_dry_run.dry_run(StateDir(tmp_path), None, tmp_path / "job.yaml", as_json=False)
        text = " ".join(capsys.readouterr().out.split())
        submit_dry_run.dry_run(StateDir(tmp_path), None, tmp_path / "job.yaml", as_json=True)
        found = json.loads(capsys.readouterr().out)
        (task,) = found["plan"]["tasks"]
        return text, task, found["copies_bytes"]

    text, task, whole_bytes = shown()
    most = in_gib(task["copies_bytes"])
    assert f"alpha takes up to {most} of host memory of the 64.0 MiB" in text
    assert f"copies in host memory, {in_gib(whole_bytes / 2)} a node on one or two nodes" in text
    d.state.policy = msgspec.structs.replace(d.state.policy, copies_bytes_max=1 << 20)
    text, too_large, _ = shown()
    assert too_large["copies_bytes"] == 0
    assert "alpha will keep no in-memory checkpoints: they do not fit: " in text
    d.state.policy = msgspec.structs.replace(d.state.policy, copies_bytes_max=0)
    started = task_of(d, d.running(parse(job)))
    assert max(node_bytes(started).values()) == task["copies_bytes"], "what it takes once it runs"
    assert sum(node_bytes(started).values()) == pytest.approx(whole_bytes, rel=1e-4)


def test_copies_that_are_off_or_of_unknown_size_have_no_number() -> None:
    spec = parse(loop())
    assert choices(spec).copies_bytes == 4 * 14 * choices(spec).num_parameters
    unknown = loop()
    del unknown["loop"]["model"]
    assert choices(parse(unknown)).copies_bytes == 0
    off = loop()
    off["loop"]["copy_every"] = 0
    assert choices(parse(off)).copies_bytes == 0


def test_a_named_cluster_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(json.dumps(command()))
    with pytest.raises(Unreachable):
        submit_dry_run.dry_run(
            StateDir(tmp_path), ["http://127.0.0.1:9"], tmp_path / "job.yaml", as_json=False
        )


@pytest.mark.nodes(3)
def test_a_described_loop_is_planned_by_its_memory(d: Driver) -> None:
    task = task_of(d, d.submit(parse(loop(slots={"min": 1, "max": 6}))))
    assert task.throughput is not None
    assert task.throughput.sizes == (4,)
    num_parameters = choices(task.spec).num_parameters
    assert seat_bytes(task, 4) == 14 * num_parameters // 4, "weights and the whole optimizer state"
