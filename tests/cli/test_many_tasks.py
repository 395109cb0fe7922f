"""Hundreds of tasks: what the screens list, count and filter; hostile names; several at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import past_screens
import pytest
import yaml
from cli_process import in_process
from decider import Driver, spec
from two_tasks import seen
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands import operate, status, tasks
from unicron.cli.screens import cluster, nodes
from unicron.cli.terminal import console, times
from unicron.cli.terminal import format as fmt
from unicron.control_plane.api.view import view
from unicron.control_plane.history.history import History
from unicron.events.errors import UnicronError, UsageError
from unicron.events.records.reports import TaskCancelRequested

SLEEP: dict[str, Any] = {"train": None, "command": ["sleep", "9"], "slots": {"min": 1, "max": 1}}
HOSTILE = "\x1b[2J\x1b]0;own\x07 <b>[red]x[/red]</b> & \u202egnp\u2028\nNEEDS YOU  nothing"


@pytest.fixture
def many() -> Driver:
    """Two slots, and 200 commands of one slot."""
    driver = Driver(nodes=1, slots=2)
    for number in range(200):
        driver.submit(spec(name=f"sleep-{number}", team="x" if number % 2 else "", **SLEEP))
    return driver


def screen(d: Driver, **options: Any) -> list[str]:
    return cluster.status(view(d.state, explain=True), cluster="c", now_s=d.now_s, **options)


# --- status -------------------------------------------------------------------------------------
def test_a_long_list_is_counted_and_a_reason_is_printed_once(many: Driver) -> None:
    lines = screen(many)
    assert len(lines) < 70
    assert any(line.startswith("tasks  198 waiting, 2 ") for line in lines)
    assert "and 160 more: unicron status tasks" in lines
    assert sum("others:" in line for line in lines) <= cluster.REASONS_NUM_MAX
    rows = [line.split() for line in lines if " sleep-" in line and "0  " in line]
    assert {row[2] for row in rows[:2]} == {"STARTING"}, "those with slots come first"


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 60), (40, 12)])
def test_a_terminal_is_filled_and_not_exceeded(
    many: Driver, columns: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fmt, "SCREEN_COLUMNS", min(columns, fmt.COLUMNS_MAX))
    lines = status._fitted(screen(many, height=rows), columns, rows)
    assert len(lines) == rows or rows == 12
    assert len(lines) <= rows
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("unicron status")
    assert rows == 12 or any("more: unicron status tasks"[:columns] in line for line in lines)


def shown(d: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **asked: Any) -> None:
    def get(path: str, *_: object, **query: object) -> object:
        return {"cluster": "c"} if path == "/v1/health" else seen(d)

    client = mock.Mock(get=get)
    monkeypatch.setattr(status, "connect_to_read", lambda state, url: client)
    status.status(
        StateDir(tmp_path), None, **{"what": "tasks", "watch": False, "as_json": False, **asked}
    )


def test_filters(
    many: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown(many, tmp_path, monkeypatch)
    assert capsys.readouterr().out.count(" WAITING ") == 198
    shown(many, tmp_path, monkeypatch, what="sleep-1?", only="waiting")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed[1:11]] == [
        f"sleep-{number}" for number in range(10, 20)
    ]
    assert printed[-1] == "10 waiting"
    shown(many, tmp_path, monkeypatch, what="sleep-[1]", wide=True)
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert head.split()[-4:] == ["TEAM", "PRIORITY", "TIER", "NODES"]
    assert row.split()[-4] == "x"
    shown(many, tmp_path, monkeypatch, what="", as_json=True, only="waiting")
    assert len(json.loads(capsys.readouterr().out)) == 198
    shown(many, tmp_path, monkeypatch, what="nap-*")
    assert capsys.readouterr().out.splitlines()[-1] == "no task"
    for what in ("nodes", "sleep-1"):
        with pytest.raises(UsageError, match="chooses tasks of a list"):
            shown(many, tmp_path, monkeypatch, what=what, only="running")


def test_yaml_is_the_json_document(
    many: Driver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(console, "_form", ["yaml"])
    shown(many, tmp_path, monkeypatch, what="", as_json=True)
    assert yaml.safe_load(capsys.readouterr().out) == json.loads(json.dumps(seen(many)))


def test_a_command_without_a_model_earns_nothing(many: Driver) -> None:
    assert not [line for line in screen(many) if line.startswith("plan ")]
    found = view(many.state)
    page = past_screens.task_status(found, found["tasks"][0], History(), now_s=many.now_s)
    (line,) = [line for line in page if line.startswith("earns")]
    assert "nothing that is known" in line


# --- names --------------------------------------------------------------------------------------
def test_no_name_reaches_the_terminal_as_it_is(
    many: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names are checked when a job is read; reasons, hosts and labels of others are not."""
    found = view(many.state, explain=True)
    for one in found["tasks"]:
        one |= {
            "name": HOSTILE,
            "why": HOSTILE,
            "needs": HOSTILE,
            "team": HOSTILE,
            "withheld": HOSTILE,
            "output": HOSTILE,
            "layout": HOSTILE,
        }
    for node in found["nodes"]:
        node |= {
            "drained": True,
            "drain_reason": HOSTILE,
            "host": HOSTILE,
            "accelerator": HOSTILE,
            "labels": {"rack": HOSTILE, "switch": HOSTILE},
        }
    console.lines(
        [
            *cluster.status(found, cluster=HOSTILE, now_s=many.now_s),
            *cluster.tasks(found["tasks"][:3], wide=True),
            *nodes.nodes(found, now_s=many.now_s),
            *past_screens.task_status(found, found["tasks"][0], History(), now_s=many.now_s),
        ]
    )
    console.error(f"no task {HOSTILE}", HOSTILE)
    captured = capsys.readouterr()
    for text in captured.out, captured.err:
        assert all(line.isprintable() for line in text.split("\n"))
    assert "\\x1b[2J" in captured.out
    assert not [line for line in captured.out.splitlines() if line.startswith("NEEDS YOU  nothing")]


# --- several at once ----------------------------------------------------------------------------
def requests(d: Driver, monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    client = mock.Mock(
        get=lambda path: seen(d),
        records=lambda after, follow: iter(()),
        post=mock.Mock(return_value={"seq": 9}),
    )
    for module in (operate, tasks):
        monkeypatch.setattr(module, "connect", lambda state, url: client)
    return client


def test_tasks_are_cancelled_by_name_and_pattern(
    many: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = requests(many, monkeypatch)
    tasks.cancel(StateDir(tmp_path), None, ["sleep-19?", "sleep-3,sleep-199"], "", as_json=False)
    ids = {task["name"]: task["id"] for task in seen(many)["tasks"]}
    assert [call.args[0] for call in client.post.call_args_list] == [
        f"/v1/tasks/{ids[f'sleep-{number}']}/cancel" for number in (*range(190, 200), 3)
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [(["nap-*"], "no task has a name like 'nap-\\*'"), (["sleep-1", "nap"], "no task 'nap'")],
)
def test_nothing_is_cancelled_if_a_word_is_wrong(
    many: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], error: str
) -> None:
    client = requests(many, monkeypatch)
    with pytest.raises(UsageError, match=error) as refused:
        tasks.cancel(StateDir(tmp_path), None, words, "", as_json=False)
    assert refused.value.hint
    client.post.assert_not_called()


@pytest.mark.nodes(3, slots=1)
def test_nodes_are_drained_by_pattern_in_one_request(
    d: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = requests(d, monkeypatch)
    operate.drain(StateDir(tmp_path), None, ["n[12]", "n2"], "fans", as_json=False)
    client.post.assert_called_once_with("/v1/nodes/n1,n2/drain", {"reason": "fans"})


# --- wait ---------------------------------------------------------------------------------------
def waiting_for(until: str, tmp_path: Path, timeout_s: float = 0.0) -> None:
    tasks.wait(StateDir(tmp_path), None, ["alpha"], until, timeout_s, as_json=False)


def test_wait_ends_when_it_is_so(
    d: Driver,
    task: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests(d, monkeypatch)
    for until in ("running", "healed"):
        waiting_for(until, tmp_path)
        assert capsys.readouterr().out == "alpha running\n"
    with pytest.raises(UnicronError, match="alpha not finished after 0 ms, but running") as late:
        waiting_for("finished", tmp_path)
    assert (late.value.exit_code, late.value.hint[:20]) == (1, "unicron status alpha")
    opened = d.exit(task, 3)
    with pytest.raises(UnicronError, match="alpha not healed after 0 ms, but healing"):
        waiting_for("healed", tmp_path)
    d.obey(opened)
    d.progress(task)
    with pytest.raises(UnicronError, match="alpha not healed after 0 ms, but recovering"):
        waiting_for("healed", tmp_path)
    d.heal(task)
    waiting_for("healed", tmp_path)


def test_wait_ends_when_it_cannot_be_so_any_more(
    d: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests(d, monkeypatch)
    task = d.running()
    d.obey(d.tell("operator/1", TaskCancelRequested(task=task)))
    with pytest.raises(UnicronError) as ended:
        waiting_for("finished", tmp_path, 9.0)
    assert ended.value.exit_code == 1


# --- times and words ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("2999-01-01T00:00:00Z", "is in the future"),
        ("soon", "is neither a length"),
        ("-2h", "is neither a length"),
        ("", "is neither a length"),
    ],
)
def test_a_moment_that_cannot_be_is_refused(text: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=error):
        times.past_s(text)
    for command in (("tail",), ("incident", "--all"), ("logs", "x")):
        found = in_process((*command, f"--since={text}"), tmp_path, {"HOME": str(tmp_path)})
        assert found.returncode == 2
        assert error in found.stderr.splitlines()[0]
        assert len(found.stderr.splitlines()) == 2


def test_a_length_of_time_is_before_now() -> None:
    now_s = times.past_s("1s") + 1
    assert abs(now_s - times.past_s("2h") - 7200) < 1
    assert times.past_s("2026-11-27T02:10:00Z") == 1795745400.0


@pytest.mark.parametrize("words", ["get", "list", "describe", "top", "cordon", "uncordon"])
def test_words_of_kubectl_are_understood(words: str, tmp_path: Path) -> None:
    found = in_process((words, "--help"), tmp_path, {"HOME": str(tmp_path)})
    assert found.returncode == 0
    assert found.stdout.startswith("Usage: unicron ")
    every = in_process(("--help",), tmp_path, {"HOME": str(tmp_path)}).stdout.splitlines()
    assert not [line for line in every if line.startswith(f"  {words} ")]


JOB = "apiVersion: unicron/v1\nname: NAME\ncommand: ['true']\nslots: {min: 1, max: 2}\n"


@pytest.mark.parametrize("form", ["text", "json", "yaml"])
def test_a_dry_run_of_several_files_shows_each(form: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.yaml" for name in ("a", "b")]
    for path in paths:
        path.write_text(JOB.replace("NAME", path.stem))
    found = in_process(
        ("submit", *map(str, paths), "--dry-run", "-o", form), tmp_path, {"HOME": str(tmp_path)}
    )
    assert found.returncode == 0, found
    if form == "text":
        assert found.stdout.count("no cluster runs here") == 2
        return
    documents = (
        list(yaml.safe_load_all(found.stdout))
        if form == "yaml"
        else [json.loads(line) for line in found.stdout.splitlines()]
    )
    assert [one["plan"] for one in documents] == [None, None]
    paths[1].write_text("nonsense")
    assert (
        in_process(
            ("submit", *map(str, paths), "--dry-run"), tmp_path, {"HOME": str(tmp_path)}
        ).returncode
        == 2
    )
