"""Trace files: all formats give the same events, and invalid files are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import trace_csv
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.control_plane.incidents.severity import TABLE
from unicron.control_plane.simulation.trace import trace_file
from unicron.control_plane.simulation.trace.external_event import EVENTS, ExternalEvent
from unicron.events.errors import UsageError

CHURN = Path(__file__).parents[3] / "deploy" / "scenarios" / "aws_p3_churn.csv"
HEAD = "at_s,node,event,cause\n"
WITH_REPAIR = "at_s,node,event,cause,repair_s\n"


def told(text: str) -> list[ExternalEvent]:
    return trace_file.read(text, "t")


def test_all_formats_give_the_same_events() -> None:
    same = [
        ExternalEvent(1.5, "n1", "fault", "ECC errors"),
        ExternalEvent(61.5, "n1", "repaired"),
        ExternalEvent(70.0, "n2", "left"),
    ]
    assert told(HEAD + "70,n2,left,\n1.5,n1,fault,ECC errors\n61.5,n1,repaired,\n") == same
    assert (
        told("\ufeff# of nobody\n" + WITH_REPAIR + "1.5,n1,fault,ECC errors,60\n\n70,n2,left,,\n")
        == same
    )


@pytest.mark.parametrize("written", ["ECC errors", "ECC error", " ecc_errors", "Ecc Errors "])
def test_causes_are_accepted_in_several_spellings(written: str) -> None:
    assert told(f"{HEAD}1,n1,fault,{written}\n") == [
        ExternalEvent(1.0, "n1", "fault", "ECC errors")
    ]


def test_the_trace_of_spot_nodes() -> None:
    found = told(CHURN.read_text(encoding="utf-8"))
    num = {"joined": 177 - 18, "fault": 167}
    assert {kind: sum(one.event == kind for one in found) for kind in EVENTS} == {
        "repaired": 0,
        "left": 0,
    } | num
    assert {one.cause for one in found} == {"", "lost connection"}
    assert found[-1] == ExternalEvent(40920.0, "node172", "fault", "lost connection")


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            lambda at_ms, node, event, cause: ExternalEvent(
                at_ms / 1000, node, EVENTS[event], cause if event == "fault" else ""
            ),
            st.integers(0, 10**12),
            st.text('ab-é, "', min_size=1, max_size=5).filter(lambda name: name == name.strip()),
            st.sampled_from([*EVENTS]),
            st.sampled_from([*TABLE]),
        ),
        max_size=8,
    )
)
def test_a_written_trace_reads_back_unchanged(happenings: list[ExternalEvent]) -> None:
    text = "\n".join(trace_csv.written(happenings))
    assert told(text) == sorted(happenings, key=lambda one: one.at_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: the header is missing"),
        ("\n# nothing\n", "line 1: the header is missing"),
        ("at_s,node,event\n", "line 1: the header is at_s,node,event"),
        (HEAD + "1,n1,fault\n", "line 2: 3 columns"),
        (HEAD + "\n# more\nsoon,n1,fault,ECC errors\n", "line 4: at_s is 'soon'"),
        (HEAD + "-1,n1,fault,ECC errors\n", "line 2: at_s is -1"),
        (HEAD + "nan,n1,fault,ECC errors\n", "line 2: at_s is nan"),
        (HEAD + "1e400,n1,fault,ECC errors\n", "line 2: at_s is inf"),
        (HEAD + "1,,left,\n", "line 2: '' names no node"),
        (HEAD + "1,n\x1b[1m,left,\n", "line 2: 'n\\x1b[1m' names no node"),
        (HEAD + f"1,{'n' * 300},left,\n", "line 2: 'nnn"),
        (HEAD + "1,n1,died,\n", "line 2: event is 'died'"),
        (HEAD + "1,n1,fault,gremlins\n", "line 2: cause is 'gremlins'"),
        (HEAD + '1,"n1\n', "line 2: 2 columns"),
        (HEAD + f"1,{'n' * 200_000},left,\n", "line 2: field larger than field limit"),
        (WITH_REPAIR + "1,n1,fault,ECC errors,-5\n", "line 2: repair_s is -5"),
        (WITH_REPAIR + "1,n1,fault,ECC errors,long\n", "line 2: repair_s is 'long'"),
        (WITH_REPAIR + "1,n1,left,,5\n", "line 2: repair_s without a fault"),
        ("at_s,\x1b[1m\n", "line 1: the header is 'at_s,\\x1b[1m'"),
    ],
)
def test_an_invalid_trace_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        trace_file.read(text, "t.csv")
    assert str(refused.value).startswith(f"t.csv: {said}")
    assert "\n" not in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400
    assert refused.value.hint
