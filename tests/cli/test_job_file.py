"""Job files: strict YAML to a checked spec, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from unicron.cli.files import job_file
from unicron.cli.files.job_file import read_yaml
from unicron.events.errors import SpecError, UsageError
from unicron.workers.host import object_storage

EXAMPLES = Path(__file__).resolve().parents[2] / "deploy" / "examples"
GOOD = """\
apiVersion: unicron/v1
name: small
weight: 2
slots: {min: 1, max: 2}
throughput: {1: 1e9, 2: 1.9e9}
train:
  batch: {global: 8, micro: 2}
  optimizer: {lr: 1e-3, min_lr: 1E-4}
  iterations: 10
  data: [text.txt]
  output: out
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def test_a_good_file_becomes_a_spec_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = job_file.load(written(tmp_path, GOOD))
    assert spec.train is not None
    assert spec.train.optimizer.lr == 0.001
    assert spec.train.optimizer.min_lr == 0.0001
    assert spec.throughput == {1: 1e9, 2: 1.9e9}
    assert spec.train.output == str(tmp_path / "out")
    assert spec.train.data == (str(tmp_path / "text.txt"),)


def test_a_url_stays_a_url_and_its_driver_is_asked_for_at_once(tmp_path, monkeypatch):
    def of(output: str) -> Path:
        return written(tmp_path, GOOD.replace("output: out", f"output: {output}"))

    spec = job_file.load(of("file:///tmp/run/"))
    assert spec.train is not None
    assert spec.train.output == "file:///tmp/run/"
    with pytest.raises(UsageError, match="knows no nowhere://"):
        job_file.load(of("nowhere://bucket/run"))
    text = GOOD[:GOOD.index("train:")] + (
        "command: [a]\nheal: in-memory\n"
        "loop: {micro_batches: 4, iterations: 3, output: nowhere://bucket/run}\n")
    with pytest.raises(UsageError, match=r"job\.yaml: loop\.output: fsspec knows no"):
        job_file.load(written(tmp_path, text))
    monkeypatch.setattr(object_storage, "is_installed", lambda: False)
    job_file.load(of("nowhere://bucket/run"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_accepted(path):
    job_file.load(path)


@pytest.mark.parametrize(("text", "value"), [
    ("1e-3", 0.001), ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("-3", -3), ("010", 10),
    ("6.02e23", 6.02e23), ("true", True), ("null", None), ("", None), ("no", "no"), ("on", "on"),
    ("2026-01-01", "2026-01-01"), ("1:30", "1:30"), ("'1e-3'", "1e-3"), ("0x10", "0x10"),
    ("1_000", "1_000"),
])
def test_scalars_are_those_of_the_core_schema(text, value):
    read = read_yaml(f"a: {text}")["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(("text", "words"), [
    ("a: 1\nb: 2\na: 3", "line 3: duplicate key 'a', first given in line 1"),
    ("a: {b: 1, b: 2}", "duplicate key 'b'"),
    ("throughput: {1: 2, 1: 3}", "duplicate key 1"),
    ("a: &x 1\nb: *x", "line 2, column 4: an alias (*) is not supported"),
    ("a: [1", "line 1, column 6"),
    ("? [1]\n: 2", "a key is a plain word or a number"),
    ("a: !!python/object:os.system x", "line 1, column 4"),
    ("\ta: 1", "line 1, column 1"),
    ("a: 1\n---\nb: 2", "another document"),
    ("[" * 3000, "nested too deeply"),
    ("a: 99999999999999999999999", "too large a number"),
    ("a: \x00", "#x0000"),
])
def test_bad_yaml_is_refused_with_its_place(text, words):
    with pytest.raises(SpecError) as caught:
        read_yaml(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(("old", "new", "words"), [
    ("unicron/v1", "unicron/v9", "apiVersion: is 'unicron/v9'"),
    ("  iterations: 10\n", "", "iterations"),
    ("iterations: 10", "iterations: ten", "train.iterations"),
    ("iterations: 10", "iterations: 10\n  lerning_rate: 1", "lerning_rate"),
    ("global: 8", "global: 7", "train.batch.global: 7 is not a multiple of micro 2"),
    ("max: 2", "max: 5", "slots.max: 5 ranks, but an iteration has 4 micro-batches"),
    ("weight: 2", "weight: 0", "weight"),
    ("weight: 2", "weight: .nan", "weight"),
    ("name: small", "name: No", "'No' is not a name"),
    ("lr: 1e-3", "lr: .inf", "train.optimizer.lr"),
])
def test_a_bad_spec_is_refused_with_file_path_and_hint(tmp_path, old, new, words):
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        job_file.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("make", ["absent", "folder", "binary", "huge", "empty", "list"])
def test_what_is_no_job_file_is_refused_in_one_line(tmp_path, make):
    path = tmp_path / "job.yaml"
    if make == "folder":
        path.mkdir()
    elif make == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    elif make == "huge":
        path.write_bytes(b"#" * (job_file.FILE_BYTES_MAX + 1))
    elif make == "empty":
        path.write_text("")
    elif make == "list":
        path.write_text("- 1\n- 2\n")
    with pytest.raises(UsageError) as caught:
        job_file.load(path)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
