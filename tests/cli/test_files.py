"""Job files, policy files, and the YAML readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.cli.files import job_file
from unicron.cli.files.job_file import load_policy as read_policy
from unicron.cli.files.job_file import read_large, read_yaml
from unicron.events import object_storage
from unicron.events.errors import SpecError, UsageError
from unicron.events.spec.policy import BOUNDS, Policy

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
    assert (spec.train.optimizer.lr, spec.train.optimizer.min_lr) == (0.001, 0.0001)
    assert spec.throughput == {1: 1e9, 2: 1.9e9}
    assert spec.train.output == str(tmp_path / "out")
    assert spec.train.data == (str(tmp_path / "text.txt"),)


COMMAND = """\
apiVersion: unicron/v1
name: small
command: [python, train.py]
heal: in-memory
loop: {micro_batches: 8, iterations: 20, output: runs/mine}
"""


def test_a_command_starts_where_its_output_is_relative_to(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = job_file.load(written(tmp_path / "jobs", COMMAND))
    assert spec.loop is not None
    assert (spec.folder, spec.loop.output) == (str(tmp_path), str(tmp_path / "runs/mine"))
    assert job_file.load(written(tmp_path, COMMAND + "folder: jobs\n")).folder == str(
        tmp_path / "jobs"
    )
    assert job_file.load(written(tmp_path, GOOD)).folder == ""
    with pytest.raises(UsageError, match="folder: is for a command"):
        job_file.load(written(tmp_path, GOOD + "folder: jobs\n"))


def test_a_url_is_kept_and_its_driver_is_checked(tmp_path, monkeypatch):
    def of(output: str) -> Path:
        return written(tmp_path, GOOD.replace("output: out", f"output: {output}"))

    spec = job_file.load(of("file:///tmp/run/"))
    assert spec.train is not None
    assert spec.train.output == "file:///tmp/run/"
    with pytest.raises(UsageError, match="knows no nowhere://"):
        job_file.load(of("nowhere://bucket/run"))
    text = GOOD[: GOOD.index("train:")] + (
        "command: [a]\nheal: in-memory\n"
        "loop: {micro_batches: 4, iterations: 3, output: nowhere://bucket/run}\n"
    )
    with pytest.raises(UsageError, match=r"job\.yaml: loop\.output: fsspec knows no"):
        job_file.load(written(tmp_path, text))
    monkeypatch.setattr(object_storage, "is_installed", lambda: False)
    job_file.load(of("nowhere://bucket/run"))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_accepted(path):
    job_file.load(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-3", -3),
        ("010", 10),
        ("6.02e23", 6.02e23),
        ("true", True),
        ("null", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("'1e-3'", "1e-3"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
    ],
)
def test_scalars_are_those_of_the_core_schema(text, value):
    read = read_yaml(f"a: {text}")["a"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
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
    ],
)
def test_bad_yaml_is_refused_with_its_place(text, words):
    with pytest.raises(SpecError) as caught:
        read_yaml(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
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
    ],
)
def test_a_bad_spec_is_refused_with_file_path_and_hint(tmp_path, old, new, words):
    path = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        job_file.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        Path.mkdir,
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_bytes(b"#" * (job_file.FILE_BYTES_MAX + 1)),
        lambda path: path.write_text(""),
        lambda path: path.write_text("- 1\n- 2\n"),
    ],
    ids=["absent", "folder", "binary", "huge", "empty", "list"],
)
def test_an_invalid_job_file_is_refused_in_one_line(tmp_path, make):
    path = tmp_path / "job.yaml"
    make(path)
    with pytest.raises(UsageError) as caught:
        job_file.load(path)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


# --- policy files --------------------------------------------------------------------------------
def test_a_policy_file_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    for text, policy in (
        ("silence_s_max: 3\ngain_min: 1e-3\n", Policy(silence_s_max=3.0, gain_min=0.001)),
        (
            "moves_max: 0\nquotas: {red: 8, blue: 0}\n",
            Policy(moves_max=0, quotas={"red": 8, "blue": 0}),
        ),
        ("floor: true\nalpha: 0.5\n", Policy(floor=True, alpha=0.5)),
        ('{"silence_s_max": 4}', Policy(silence_s_max=4.0)),
        ("", Policy()),
        ("# nothing", Policy()),
        ("observe: false", Policy()),
        ("hot_spare: true", Policy(hot_spare=True)),
        ("shared_folders: [/mnt/a, /b]", Policy(shared_folders=("/mnt/a", "/b"))),
    ):
        path.write_text(text)
        assert read_policy(path) == policy
    for text in (
        "silence_s_may: 3",
        "silence_s_max: often",
        "- 1",
        "a: [",
        "silence_s_max: .nan",
        "silence_s_max: 0",
        "restarts_max: -1",
        "moves_max: -1",
        "quotas: {red: -1}",
        "quotas: 3",
        "quotas: {red: many}",
        "moves_max: 1.5",
        "floor: 2",
        "hot_spare: often",
        "repair_s: 0",
        "silence_s_max: 3\nsilence_s_max: 4",
        "floor: yes",
        "floor: 1",
        "hot_spare: on",
        "quotas: {Red Team: 3}",
        'quotas: {"": 3}',
        "calibrate_iterations: 0",
        "calibrate_min: 5",
        "silence_s_max: 1e9",
        "moves_max: 99999999999999999999",
        "mtbf_gpu_s: 1e300",
        "transition_s: 1e300",
        "mtbf_faults: 1e308",
        "gain_min: -1",
        "gain_min: .nan",
        "alpha: .nan",
        "shared_folders: /mnt",
        "shared_folders: [mnt]",
        "shared_folders: [3]",
        "observe: true",
        "allow_inject: true",
    ):
        path.write_text(text)
        with pytest.raises(UsageError) as refused:
            read_policy(path)
        assert "\n" not in str(refused.value)
        assert refused.value.hint
    with pytest.raises(UsageError):
        read_policy(tmp_path / "absent")


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("silence_max: 3", "silence_max: is not a field", "did you mean silence_s_max?"),
        ("zzzz: 1\n.inf: 2", "zzzz: is not a field", "Policy: its fields"),
        ("- 1", "a policy is a mapping", "Policy: its fields"),
        (
            "silence_s_max: often",
            "silence_s_max: expected a number, got text",
            "Policy: its fields",
        ),
        (
            "silence_s_max: [1]",
            "silence_s_max: expected a number, got a list",
            "Policy: its fields",
        ),
        ("a: 1\n b: [", "line 2, column 3: mapping values are not allowed", "Policy: its fields"),
        ("gain_min: 1990-13-01", "gain_min: expected a number, got text", "Policy: its fields"),
        (
            "silence_s_max: 0.3",
            "silence_s_max: must be between 1.5 and 1e+06",
            "three heartbeats at least",
        ),
        ("suspect_s_max: 0.9", "suspect_s_max: must be between 1.0", "two heartbeats at least"),
        ("alpha: 3", "alpha: 3 is not one of 0, 0.5, 1, 2", "1 is proportional fairness"),
        ("alpha: equal", "alpha: expected a number, got text", "Policy: its fields"),
        ("alpha: 1\nhot_spare: true", "hot_spare: a spare is priced by WAF, and", "leave one"),
        ("gain_min: 5", "gain_min: 5 is not below 1", "0.05 is 5 %"),
        ("gain_min: 1", "gain_min: 1 is not below 1", "0.05 is 5 %"),
    ],
)
def test_a_mistake_in_a_policy_file_is_one_line_and_a_hint(
    tmp_path: Path, text: str, told: str, hint: str
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read_policy(path)
    assert str(error.value).startswith(f"{path}: {told}")
    assert "\n" not in str(error.value)
    assert hint in error.value.hint


def test_every_number_of_a_policy_has_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    for name, ends in BOUNDS.items():
        for end, beyond in zip(ends, (ends[0] / 2 - 1, ends[1] * 2), strict=True):
            shown = f"{{red: {end}}}" if name == "quotas" else end
            path.write_text(f"{name}: {shown}")
            assert getattr(read_policy(path), name) == ({"red": end} if name == "quotas" else end)
            beyond = round(beyond) if isinstance(end, int) else beyond
            path.write_text(
                f"{name}: " + (f"{{red: {beyond}}}" if name == "quotas" else f"{beyond}")
            )
            with pytest.raises(UsageError, match=f"{name}.*must be between"):
                read_policy(path)
    others = {
        "floor",
        "alpha",
        "gain_min",
        "hot_spare",
        "redact",
        "shared_folders",
        "observe",
        "allow_inject",
        "durability",
        "on_loss_not_finite",
        "on_loss_spike",
    }
    assert {*BOUNDS, *others} == set(Policy.__struct_fields__)


def test_an_endless_policy_file_is_refused() -> None:
    with pytest.raises(UsageError, match="larger than 1048576 bytes"):
        read_policy(Path("/dev/zero"))


# --- the YAML readers ---------------------------------------------------------------------------
WRONG = [
    "a: 1\na: 2",
    "a: {b: 1, b: 2}",
    "{1: 2, 1: 3}",
    "{1: 2, 1.0: 3}",
    "a: &x 1\nb: *x",
    "a: [1",
    "? [1]\n: 2",
    "? {a: 1}\n: 2",
    "a: !!python/object:os.system x",
    "\ta: 1",
    "a: 1\n---\nb: 2",
    "[" * 3000,
    "a: 99999999999999999999999",
    "a: \x00",
    "a: b: c",
    "? !!set {a}\n: 1",
    "&a [*a]",
    "%YAML 3.0\n---\na",
]


PLAIN = [
    *("1e-3", "1.5", ".5", "1.", "-3", "010", "6.02e23", "+7", "1e400", "0x10", "1_000", ".inf"),
    *("-.INF", ".nan", "NaN", "true", "False", "null", "~", "", "no", "on", "2026-01-01", "1:30"),
    *("'1e-3'", "'true'", '"7"', "&x 3", "!!str 3", "!!int '3'", "<<"),
    *("|\n  text\n", ">-\n  a\n  b"),
]

keys = st.integers(-10, 10**18) | st.text(max_size=4)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.text(max_size=6)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


def result_or_refusal(read: Callable[[str], object], text: str) -> str:
    """The repr of the value that was read (so 1, 1.0 and True differ), or the refusal."""
    try:
        return repr(read(text))
    except SpecError as error:
        return f"{error}: {error.hint}"


@pytest.mark.parametrize("scalar", PLAIN)
@pytest.mark.parametrize("around", ["a: {}", "{}", "- {}\n- 2", "{}: 1"])
def test_both_readers_read_the_same_scalars(scalar: str, around: str) -> None:
    text = around.replace("{}", scalar)
    assert result_or_refusal(read_large, text) == result_or_refusal(read_yaml, text)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_not_strict_yaml_is_refused_by_both_readers(text: str) -> None:
    with pytest.raises(SpecError) as error:
        read_yaml(text)
    assert error.value.hint
    assert result_or_refusal(read_large, text) == f"{error.value}: {error.value.hint}"


@given(values, st.booleans())
@settings(max_examples=200, deadline=None)
def test_both_readers_read_the_same_documents(value: object, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert result_or_refusal(read_large, text) == result_or_refusal(read_yaml, text)


def test_plain_data_does_not_need_the_strict_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    if not yaml.__with_libyaml__:
        pytest.skip("this PyYAML has no libyaml")
    monkeypatch.delattr(job_file, "read_yaml")
    assert read_large("a: {8: 1.0e15}\nb: [x, 'y', -2, null, true]\n") == {
        "a": {8: 1.0e15},
        "b": ["x", "y", -2, None, True],
    }
    assert read_large("") is None


def test_large_files_are_read_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert read_large("a: {8: 1.0e15}") == {"a": {8: 1.0e15}}
