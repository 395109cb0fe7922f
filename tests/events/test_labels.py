"""Node labels: strict parsing, in the state and on the screens."""

from __future__ import annotations

import copy

import pytest
from decider import Driver
from snapshots import check, seen, until
from unicron.cli.cluster.local_cluster import ClusterOptions, check_labels, labels_of
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands.up import UpOptions
from unicron.cli.screens import nodes
from unicron.control_plane.api.view import view
from unicron.events.errors import UsageError
from unicron.events.records import codec
from unicron.events.records import reports as r
from unicron.events.records.in_words import line
from unicron.events.records.types import Labels, parse_labels


def test_labels_are_read() -> None:
    assert parse_labels([]) == Labels()
    assert parse_labels(["switch=s-3.a", "rack=R_1"]) == Labels(rack="R_1", switch="s-3.a")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["rack"], "'rack' is not KEY=VALUE"),
        (["zone=a"], "'zone' is not a label; there are rack and switch"),
        (["rack=r1", "rack=r2"], "rack is given twice"),
        (["rack="], "'' is not 1 to 63"),
        (["rack=r 1"], "'r 1' is not"),
        (["rack=-"], "'-' is not"),
        (["rack=" + "r" * 64], "is not 1 to 63"),
        (["rack=r1\n"], "is not 1 to 63"),
    ],
)
def test_invalid_labels_are_refused_in_one_line(texts: list[str], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_labels(texts)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert "--label rack=r1" in refusal.value.hint


def test_up_labels_all_nodes_or_one() -> None:
    asked = ("n2:rack=r2", "rack=r1", "switch=s1")
    check_labels(asked, ["n1", "n2"])
    assert labels_of("n1", asked) == ["rack=r1", "switch=s1"]
    assert labels_of("n2", asked) == ["rack=r2", "switch=s1"]
    with pytest.raises(UsageError, match="there is no node 'n3' here"):
        check_labels(("n3:rack=r1",), ["n1", "n2"])
    with pytest.raises(UsageError, match="rack is given twice"):
        check_labels(("n1:rack=r1", "n1:rack=r2"), ["n1", "n2"])


def test_up_remembers_labels_and_refuses_to_change_them(tmp_path) -> None:
    state, before = StateDir(tmp_path), ClusterOptions(labels=("rack=r1",))
    assert UpOptions().wanted(before, state).labels == ("rack=r1",)
    assert UpOptions(labels=()).wanted(before, state).labels == ()
    UpOptions(labels=("rack=r1",)).refuse_other(before, state)
    with pytest.raises(UsageError, match="--label differs from the cluster"):
        UpOptions(labels=("rack=r2",)).refuse_other(before, state)


def test_the_state_holds_the_newest_agents_labels() -> None:
    d = Driver(nodes=2)
    assert d.state.nodes["n1"].labels == Labels()
    for incarnation, labels in ((7, Labels(rack="r1", switch="s1")), (8, Labels(rack="r2"))):
        d.tell(
            f"n1/{incarnation}",
            r.NodeJoined(
                node="n1", incarnation=incarnation, host="h", pid=1, num_slots=2, labels=labels
            ),
        )
        assert d.state.nodes["n1"].labels == labels
    assert view(d.state)["nodes"][0]["labels"] == {"rack": "r2", "switch": ""}
    shown = line(codec.to_plain(d.log[-1]))
    assert "rack r2" in shown
    assert "switch" not in shown


def test_the_screen_shows_racks_where_there_are_any() -> None:
    state_view, now_s = seen(until("TaskProgressed", 2))
    state_view = copy.deepcopy(state_view)
    state_view["nodes"][1]["labels"] = {"rack": "r1", "switch": "s1"}
    check("nodes-racks", nodes.nodes(state_view, now_s=now_s), columns_max=100)
