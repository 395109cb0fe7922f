"""A policy file: what it may say, and how what it may not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from unicron.cli.files.policy_file import load as read_policy
from unicron.events.errors import UsageError
from unicron.events.spec.policy import BOUNDS, Policy


def test_a_policy_file_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("silence_s_max: 3\ngain_min: 1e-3\n")
    assert (read_policy(path).silence_s_max, read_policy(path).gain_min) == (3.0, 0.001)
    path.write_text("moves_max: 0\nquotas: {red: 8, blue: 0}\n")
    assert (read_policy(path).moves_max, read_policy(path).quotas) == (0, {"red": 8, "blue": 0})
    path.write_text("floor: true\nalpha: 0.5\n")
    assert (read_policy(path).floor, read_policy(path).alpha) == (True, 0.5)
    path.write_text('{"silence_s_max": 4}')
    assert read_policy(path).silence_s_max == 4.0
    for text in ("", "# nothing", "observe: false"):
        path.write_text(text)
        assert read_policy(path) == Policy()
    path.write_text("hot_spare: true")
    assert read_policy(path) == Policy(hot_spare=True)
    for text in ("silence_s_may: 3", "silence_s_max: often", "- 1", "a: [", "silence_s_max: .nan",
                 "silence_s_max: 0", "restarts_max: -1", "moves_max: -1", "quotas: {red: -1}",
                 "quotas: 3", "quotas: {red: many}", "moves_max: 1.5", "floor: 2",
                 "hot_spare: often", "repair_s: 0", "silence_s_max: 3\nsilence_s_max: 4",
                 "floor: yes", "floor: 1", "hot_spare: on", "quotas: {Red Team: 3}",
                 "quotas: {\"\": 3}", "calibrate_iterations: 0", "calibrate_min: 5",
                 "silence_s_max: 1e9", "moves_max: 99999999999999999999",
                 "mtbf_gpu_s: 1e300", "transition_s: 1e300", "mtbf_faults: 1e308",
                 "gain_min: -1", "gain_min: .nan", "alpha: .nan",
                 "observe: true", "allow_inject: true"):
        path.write_text(text)
        with pytest.raises(UsageError) as refused:
            read_policy(path)
        assert "\n" not in str(refused.value)
        assert refused.value.hint
    with pytest.raises(UsageError):
        read_policy(tmp_path / "absent")


@pytest.mark.parametrize(("text", "told", "hint"), [
    ("silence_max: 3", "silence_max: is not a field", "did you mean silence_s_max?"),
    ("- 1", "a policy is a mapping", "Policy: its fields"),
    ("silence_s_max: often", "silence_s_max: expected a number, got text", "Policy: its fields"),
    ("silence_s_max: [1]", "silence_s_max: expected a number, got a list", "Policy: its fields"),
    ("a: 1\n b: [", "line 2, column 3: mapping values are not allowed", "Policy: its fields"),
    ("gain_min: 1990-13-01", "gain_min: expected a number, got text", "Policy: its fields"),
    ("alpha: 3", "alpha: 3 is not one of 0, 0.5, 1, 2", "1 is proportional fairness"),
    ("alpha: equal", "alpha: expected a number, got text", "Policy: its fields"),
    ("alpha: 1\nhot_spare: true", "hot_spare: a spare is priced by WAF, and", "leave one"),
    ("gain_min: 5", "gain_min: 5 is not below 1", "0.05 is 5 %"),
    ("gain_min: 1", "gain_min: 1 is not below 1", "0.05 is 5 %"),
])
def test_a_slip_in_a_policy_file_is_one_line_and_a_hint(tmp_path: Path, text: str, told: str,
                                                        hint: str) -> None:
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
            path.write_text(f"{name}: " + (f"{{red: {beyond}}}" if name == "quotas"
                                           else f"{beyond}"))
            with pytest.raises(UsageError, match=f"{name}.*must be between"):
                read_policy(path)
    others = {"floor", "alpha", "gain_min", "hot_spare", "observe", "allow_inject"}
    assert {*BOUNDS, *others} == set(Policy.__struct_fields__)


def test_a_policy_without_end_is_not_read_to_its_end() -> None:
    with pytest.raises(UsageError, match="larger than 1048576 bytes"):
        read_policy(Path("/dev/zero"))
