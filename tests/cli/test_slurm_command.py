"""`unicron slurm`: what follows from the nodes of Slurm, and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from unicron.cli.commands.slurm import SlurmNode, Step, parse_nodes, steps, unicron_name

LISTING = """\
n1|idle|none
Node_02|drained|a fan is loud | very
n3|down*|Not responding
"""


def node(name: str, **known: Any) -> dict[str, Any]:
    return {
        "id": name,
        "drained": False,
        "drain_reason": "",
        "quarantine": None,
        "contact": "heard",
        "down": False,
        **known,
    }


def after(slurm: SlurmNode, *, both_ways: bool = False, **known: Any) -> list[Step]:
    there = unicron_name(slurm.name)
    return list(steps({there: slurm}, [node(there, **known)], both_ways=both_ways))


def test_nodes_are_read_from_sinfo() -> None:
    found = parse_nodes(LISTING)
    assert found["node-02"] == SlurmNode("Node_02", "drained", "a fan is loud | very")
    assert [name for name, one in found.items() if one.is_out] == ["node-02", "n3"]


@pytest.mark.parametrize(
    "state", ["drained", "draining", "drng", "down", "down*", "drained*", "fail", "failing"]
)
def test_a_node_that_slurm_does_not_use_is_drained_with_its_reason(state: str) -> None:
    out = SlurmNode("Node_02", state, "a fan is loud")
    assert after(out) == [Step("drain", "node-02", f"slurm: {state.rstrip('*')}, a fan is loud")]
    assert not after(out, drained=True, drain_reason="by me")
    (told,) = after(SlurmNode("n1", state, "x" * 500))
    assert len(told.reason) == 200


def test_slurm_says_once_that_an_unreachable_node_is_down() -> None:
    down, silent = SlurmNode("n1", "down*", "Not responding"), {"contact": "unreachable"}
    told = [Step("drain", "n1", "slurm: down, Not responding", down=True)]
    assert after(down, **silent) == told
    assert after(down, drained=True, drain_reason="by me", **silent) == told
    assert not after(down, drained=True, drain_reason=told[0].reason, down=True, **silent)
    assert not after(SlurmNode("n1", "drained*", "a fan"), drained=True, **silent)


@pytest.mark.parametrize("state", ["idle", "allocated", "mixed", "completing", "idle*"])
def test_only_what_slurm_has_drained_is_undrained(state: str) -> None:
    used = SlurmNode("n1", state, "none")
    assert after(used, drained=True, drain_reason="slurm: drained, x") == [
        Step("undrain", "n1", f"slurm: {state}")
    ]
    for reason in ("by me", "slurm job 7: Slurm takes its nodes back"):
        assert not after(used, drained=True, drain_reason=reason)
    assert not after(used)


def test_a_quarantined_node_is_drained_in_slurm_only_if_that_is_asked() -> None:
    used, quarantine = SlurmNode("N1", "mixed", "none"), {"why": "2 faults"}
    assert not after(used, quarantine=quarantine)
    assert after(used, both_ways=True, quarantine=quarantine) == [
        Step("DRAIN", "N1", "unicron: 2 faults")
    ]
    out = SlurmNode("N1", "drained", "unicron: 2 faults")
    assert not after(out, both_ways=True, quarantine=quarantine)  # it is not drained here too
    assert after(out, both_ways=True) == [Step("RESUME", "N1")]
    assert not after(out)


def test_nodes_that_slurm_does_not_know_stay_as_they_are() -> None:
    assert not list(
        steps({}, [node("n1", drained=True, drain_reason="slurm: down, x")], both_ways=True)
    )


def test_without_slurm_it_is_one_line(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "unicron.cli.main",
            "slurm",
            "grow",
            "1",
            "--state",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.splitlines()[0] == "error: there is no sbatch on this host"
