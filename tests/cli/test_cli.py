"""The command line: help, errors, exit codes, and modules that must not be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from cli_process import LIMIT_S, refused, unicron
from unicron.cli.cluster.local_cluster import ClusterOptions, LocalCluster
from unicron.cli.cluster.processes import last_output
from unicron.cli.cluster.state_dir import StateDir
from unicron.cli.commands.up import UpOptions
from unicron.events.errors import UsageError
from unicron.events.log import archive
from unicron.events.records import codec
from unicron.events.records import decisions as d
from unicron.events.records import orders as o
from unicron.events.records import reports as r
from unicron.events.records.codec import UnknownBody
from unicron.events.records.envelope import Record
from unicron.events.records.in_words import line
from unicron.events.records.reports import EpochStarted, PolicySet
from unicron.events.spec.policy import Policy

COMMANDS = (
    "up",
    "down",
    "agent",
    "control-plane",
    "submit",
    "status",
    "tail",
    "cancel",
    "logs",
    "replay",
    "export",
    "doctor",
    "set-weight",
    "drain",
    "undrain",
    "lift",
    "freeze",
    "unfreeze",
    "inject",
    "incident",
    "plan",
    "locate",
    "classify",
    "token",
)
JOB = """\
apiVersion: unicron/v1
name: small
train: {iterations: 3, output: out}
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        text=True,
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
    )


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from unicron.cli.app import run_command; "
        "assert run_command(['--help']) == 0; "
        "bad = {'torch', 'redis', 'aiohttp', 'megatron', 'numpy', 'yaml'} & set(sys.modules); "
        "assert not bad, bad"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    for command in COMMANDS:
        assert f"  {command}" in result.stdout


@pytest.mark.parametrize("module", ["typer", "unicron.cli.commands.doctor"])
def test_ctrl_c_during_an_import_exits_silently(module):
    code = (
        "import os, signal, sys\n"
        "from unicron.cli.main import main\n"
        "assert 'typer' not in sys.modules\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "sys.argv = ['unicron', 'doctor']\n"
        "main()"
    )
    result = python(code)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        "inject rank",
        "inject stop",
        "inject node",
        "token create",
        "token list",
        "token rotate",
        "token revoke",
    ],
)
def test_every_command_has_help_of_a_hundred_columns(command):
    result = unicron(*command.split(), "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(f"Usage: unicron {command}")
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_without_a_command_the_help_is_printed():
    result = unicron()
    assert result.returncode == 0
    assert "Commands:" in result.stdout


def test_a_reader_that_closes_the_pipe_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-P", "-m", "unicron.cli.main", "--version"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        timeout=LIMIT_S,
    )
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, b"")


def test_version():
    assert unicron("--version").stdout.startswith("unicron ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(
            (tuple(command.split()), "no cluster runs on")
            for command in (
                "incident",
                "status",
                "cancel alpha",
                "logs alpha",
                "freeze",
                "plan",
                "plan --without n1",
                "drain n1",
                "inject rank alpha",
                "export log.jsonl",
                "replay --live",
            )
        ),
        (("conquer",), "No such command"),
        (("up", "--fast"), "No such option: --fast"),
        (("submit",), "Missing argument 'JOB.yaml...'"),
        (("tail", "--after", "x"), "--after"),
        (("tail", "--kind", "RankExploded"), "no record is of kind 'RankExploded'"),
        (("tail", "--incident", "big"), "'big' is not an incident"),
        (("incident", "big"), "'big' is not an incident"),
        (("incident", "41", "--all"), "do not go together"),
        (("replay", "log.jsonl", "--incident", "3", "--verify"), "do not go together"),
        (("status", "-o", "xml"), "'xml'"),
        (("up", "--port", "99999"), "--port"),
        (("up", "--agents", "-1"), "--agents"),
        (("up", "--state", ""), "--state names no folder"),
        (("status", "--state="), "--state names no folder"),
        (("up", "--observe", "--act"), "do not go together"),
        (("up", "--cluster", "a b"), "is not a cluster's name"),
        (
            ("status", "--url", "http://127.0.0.1:9"),
            "no control plane answers at http://127.0.0.1:9",
        ),
        (("status", "--url", "ftp://x"), "is not a control plane's address"),
        (("tail", "-f", "--url", "http://127.0.0.1:9"), "no control plane answers"),
        (("plan", "--apply"), "--apply has nothing to apply"),
        (("plan", "--weight", "a=2", "--apply"), "--apply needs --check INPUT"),
        (("plan", "--with", "2", "--apply", "--check", "3"), "--with cannot be applied"),
        (("plan", "--with", "0"), "'--with': must be at least 1"),
        (("plan", "--with", "100001"), "'--with': must be at most 100000"),
        (("plan", "--with", "2", "--with", "4"), "--with is given more than once"),
        (("plan", "--without", "n1", "--reason", "why"), "--reason goes with --apply"),
        (("plan", "--check", "now"), "'--check': not a whole number"),
        (("plan", "-o", "csv"), "'--output': 'csv' is not one of 'text', 'json', 'yaml'"),
        (("plan", "--offline", "plan.yaml", "--url", "x"), "--offline goes with -o"),
        (("plan", "--offline", "plan.yaml", "--state", "x"), "--offline goes with -o"),
        (("plan", "--offline", "plan.yaml", "--ca", "x"), "--offline goes with -o"),
        (("plan", "--offline", "plan.yaml", "--without", "n1"), "--offline goes with -o"),
        (("megatron", "/nowhere.py"), "/nowhere.py: no such file"),
        (("megatron", "/tmp"), "/tmp: is a folder"),
        (("plan", "--submit", "/nowhere.yaml"), "/nowhere.yaml: no such file"),
        (("wait",), "Missing argument 'TASK...'"),
        (("set-weight", "alpha"), "Missing argument 'WEIGHT'"),
        (("set-weight", "alpha", "much"), "WEIGHT"),
        (("set-weight", "alpha", "nan"), "nan is not a weight"),
        (("set-weight", "alpha", "0"), "a weight is above 0"),
        (("set-weight", "alpha", "-1"), "a weight is above 0"),
        (("set-weight", "alpha", "-.5", "--reason", "x"), "a weight is above 0"),
        (("set-weight", "alpha", "--", "-1"), "a weight is above 0"),
        (("set-weight", "alpha", "2", "--reson", "x"), "No such option: --reson"),
        (("set-weight", "alpha", "2", "-r"), "No such option: -r"),
        (("inject",), "Missing command"),
        (("inject", "disk"), "No such command 'disk'"),
        (("inject", "stop", "alpha", "--for", "-1"), "--for"),
        (("up", "--policy", "absent.yaml"), "absent.yaml"),
        (("up", "--policy", "."), "directory"),
        (("control-plane", "--listen", "0.0.0.0"), "is no address at which agents reach it"),
        (("control-plane", "--listen", "0.0.0.0", "--advertise", "n1"), "unencrypted"),
        (
            ("control-plane", "--listen", "10.255.255.254"),
            "this host has no address 10.255.255.254",
        ),
        (("agent", "--url", "http://10.255.255.254:9"), "unencrypted"),
        (
            ("agent", "--url", "http://127.0.0.1:9", "--advertise", "10.255.255.254"),
            "this host has no address 10.255.255.254",
        ),
        (("replay",), "name either an exported file, a state folder or --live"),
        (
            ("replay", "log.jsonl", "--live"),
            "name either an exported file, a state folder or --live",
        ),
        (("replay", "absent.jsonl"), "absent.jsonl"),
        (("up", "--redis", "http://x"), "--redis is not a redis:// URL"),
        (("up", "--redis", "redis://127.0.0.1:9"), "no Redis answers at 127.0.0.1:9"),
        (("submit", "absent.yaml"), "absent.yaml"),
        (("agent", "--label", "rack"), "--label 'rack' is not KEY=VALUE"),
        (("up", "--label", "n9:rack=r1"), "there is no node 'n9' here"),
        (("up", "--label", "zone=a"), "'zone' is not a label; there are rack and switch"),
    ],
)
def test_wrong_input_is_one_line_and_a_hint(tmp_path, arguments, words):
    result = unicron(*arguments, folder=tmp_path)
    unreachable = words.startswith(("no cluster runs on", "no control plane answers"))
    refused(result, words, 3 if unreachable else 2)
    if words == "no cluster runs on":
        assert "hint: unicron up" in result.stderr


def test_a_task_name_in_place_of_an_incident_gets_a_hint(tmp_path):
    assert unicron("incident", "alpha", folder=tmp_path).stderr.splitlines() == [
        "error: 'alpha' is not an incident",
        "hint: for example inc-41; all, and whose they are: unicron incident --all",
    ]


def test_a_bad_policy_is_refused_before_anything_starts(tmp_path):
    for text in (
        "silence_s_may: 3",
        "observe: true",
        "allow_inject: true",
        f"moves_max: {10**20 - 1}",
        "mtbf_gpu_s: 1e300",
        "silence_s_max: 0.3",
    ):
        (tmp_path / "policy.yaml").write_text(text)
        word = "too large a number" if "999" in text else text.partition(":")[0]
        refused(unicron("up", "--policy", "policy.yaml", folder=tmp_path), word)
    os.mkfifo(tmp_path / "pipe")
    refused(unicron("up", "--policy", "pipe", folder=tmp_path), "pipe is a pipe")
    assert not (tmp_path / "state").exists()


def test_a_bad_policy_kept_in_the_folder_gets_a_hint(tmp_path):
    state = StateDir(tmp_path / "state")
    state.create()
    state.policy.write_text("mtbf_faults: 1e308")
    LocalCluster(state, UpOptions(policy=tmp_path / "any").wanted(None, state)).save()
    result = unicron("up", folder=tmp_path)
    refused(result, "mtbf_faults: must be between 0 and 1e+09")
    assert "hint: give another: unicron up --policy FILE --state" in result.stderr
    assert not state.server.exists()


def test_endless_files_are_refused(tmp_path):
    for arguments in (
        ("submit", "/dev/zero"),
        ("plan", "--submit", "/dev/zero"),
        ("up", "--policy", "/dev/zero"),
    ):
        refused(unicron(*arguments, folder=tmp_path), "/dev/zero: larger than 1048576 bytes")


def test_the_last_output_of_a_process_is_its_error(tmp_path):
    state = StateDir(tmp_path)
    state.create()
    path = state.logs / "control-plane.log"
    path.write_text("  | Traceback\n    | OverflowError: too big\n    +-------\n")
    assert last_output(state, "control-plane") == "OverflowError: too big"
    path.write_text("error: no\nhint: do\n")
    assert last_output(state, "control-plane") == "no"
    path.write_text("----\n")
    assert last_output(state, "control-plane") == "no output"


@pytest.mark.parametrize(
    ("iterations", "words", "code"),
    [(0, "job.yaml: train.iterations", 2), (3, "no cluster runs on", 3)],
)
def test_a_bad_job_is_refused_first(tmp_path, iterations, words, code):
    (tmp_path / "job.yaml").write_text(JOB.replace("iterations: 3", f"iterations: {iterations}"))
    refused(unicron("submit", "job.yaml", folder=tmp_path), words, code)


def test_a_command_in_a_hint_goes_to_the_same_cluster(tmp_path):
    """It went to the default one, which may be another."""
    state = tmp_path / "other"
    lacks = unicron("token", "list", "--state", str(state), folder=tmp_path)
    assert lacks.stderr.splitlines()[1].startswith("hint: unicron up --state other")
    words = ("log", "dead-letters", "--drop", "x", "--state", str(state))
    wrong = unicron(*words, folder=tmp_path)
    assert wrong.stderr.splitlines()[1].endswith("--drop all alone (with --state other)")


def test_a_hint_quotes_a_folder_with_blanks(tmp_path):
    state = tmp_path / "a b"
    result = unicron("status", "--state", str(state), folder=tmp_path)
    assert result.stderr.splitlines()[1].startswith("hint: unicron up --state 'a b'")
    state.mkdir()
    with StateDir(state).lock():
        result = unicron("up", "--state", str(state), folder=tmp_path)
    assert "hint: stop it with unicron down --state 'a b', " in result.stderr
    with pytest.raises(UsageError) as refusal:
        UpOptions(num_slots=3).refuse_other(ClusterOptions(), StateDir(state))
    assert refusal.value.hint == f"unicron down --state '{state}', then up again"


def test_a_file_as_state_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    refused(unicron("up", "--state", str(tmp_path / "file"), folder=tmp_path), "file")


def test_down_without_a_cluster(tmp_path):
    result = unicron("down", folder=tmp_path)
    assert result.returncode == 0
    assert result.stdout.startswith("nothing runs on")


def test_doctor_as_json(tmp_path):
    result = unicron("doctor", "-o", "json", folder=tmp_path)
    grades = {one["what"]: one["grade"] for one in json.loads(result.stdout)}
    assert grades["python"] == grades["server"] == grades["ports"] == "ok"
    assert "variables" in grades
    assert result.returncode == int("missing" in grades.values())


# --- an exported log -----------------------------------------------------------------------------
@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The shortest valid log: the start of an epoch and a policy."""

    def record(seq: int, body: EpochStarted | PolicySet) -> Record:
        return Record(
            seq=seq,
            epoch=1,
            at_s=1e9 + seq,
            occurred_s=1e9 + seq,
            source="leader/ab",
            source_seq=seq,
            cause=0,
            incident=0,
            body=body,
        )

    path = tmp_path / "log.jsonl"
    archive.write(
        path,
        [
            record(1, EpochStarted(nonce="ab", code="0", heart=1)),
            record(2, PolicySet(policy=Policy())),
        ],
        cluster="c",
        code="0",
    )
    return path


def test_replay_folds_a_file_without_any_server(log):
    result = unicron("replay", str(log))
    assert result.returncode == 0
    assert result.stdout.startswith("2 records folded, epoch 1: state unicron-state-")
    assert json.loads(unicron("replay", str(log), "-o", "json").stdout)["cluster"]["seq"] == 2


def test_replay_loads_no_server_client_and_no_torch(log):
    code = (
        f"import sys; from unicron.cli.app import run_command; "
        f"assert run_command(['replay', {str(log)!r}, '--verify']) == 0; "
        "assert not {'torch', 'redis', 'aiohttp'} & set(sys.modules)"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert "VERIFIED" in result.stdout


def test_a_file_that_fills_the_memory_is_told_in_one_line(tmp_path):
    """60 MB of empty lists take 1.5 GB."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"format":"unicron-log","a":[' + b"[]," * 20_000_000 + b"[]]}\n")
    result = python(
        "import resource, sys; from unicron.cli.app import run_command; "
        "resource.setrlimit(resource.RLIMIT_AS, (500 << 20, 500 << 20)); "
        f"sys.exit(run_command(['replay', {str(path)!r}]))"
    )
    assert result.returncode == 1
    line, hint = result.stderr.splitlines()
    assert line == "error: unicron replay needs more memory than this process may take"
    assert hint.startswith("hint: ulimit -v and free -m say how much that is")


def test_replay_until(log):
    assert unicron("replay", str(log), "--until", "1").stdout.startswith("1 records folded")
    refused(unicron("replay", str(log), "--until", "3"), "the log ends at seq 2")


@pytest.mark.parametrize("harm", ["cut", "edited", "dropped", "foreign", "empty", "binary"])
def test_a_damaged_log_is_refused(log, harm):
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(
        {
            "cut": b"".join(lines[:-1]),
            "edited": b"".join(lines).replace(b'"heart":1', b'"heart":2'),
            "dropped": b"".join(lines[:1] + lines[2:]),
            "foreign": b'{"a": 1}\n',
            "empty": b"",
            "binary": b"\xff\x00\n",
        }[harm]
    )
    for option in ((), ("--verify",)):
        result = unicron("replay", str(log), *option)
        assert result.returncode == 2
        error, hint = result.stderr.splitlines()
        assert error.startswith("error: ")
        assert hint.startswith("hint: ")
        assert str(log) in error


# --- the past ------------------------------------------------------------------------------------
GOLDEN = Path(__file__).parents[1] / "golden"
PAST = GOLDEN / "release-0.2.0.jsonl"


def test_another_decider_version_is_named_with_what_it_would_decide():
    result = unicron("replay", str(PAST), "--verify")
    assert result.returncode == 1
    assert "written by decider version 16" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    seq, recorded, now = rows[rows.index(["SEQ", "RECORDED", "NOW"]) + 1]
    assert (recorded, now) == ("StartRank", "StartRank")
    assert result.stderr.startswith("error: this version would decide otherwise")
    data = json.loads(unicron("replay", str(PAST), "--verify", "-o", "json").stdout)
    assert (data["ok"], data["different"][0]["seq"]) == (True, int(seq))
    assert data["different"][0]["now"]["body"]["place"] == 0


def test_a_log_of_a_later_version_names_the_version_that_is_needed(log):
    records = [*archive.read(log)]
    epoch = EpochStarted(nonce="ab", code="9.0", heart=99)
    later = msgspec.structs.replace(records[0], body=epoch)
    for ignorable in (True, False):
        unknown = UnknownBody(kind="Later", version=1, raw=b"\x80", ignorable=ignorable)
        path = log.with_name(f"{ignorable}.jsonl")
        archive.write(
            path,
            [later, msgspec.structs.replace(records[1], body=unknown)],
            cluster="c",
            code="9.0",
        )
        assert [*archive.read(path)][1].body == unknown
    assert unicron("replay", str(log.with_name("True.jsonl"))).returncode == 0
    for words in (("replay",), ("replay", "--verify")):
        refused(unicron(*words, str(path)), "seq 2: Later (version 1) needs Unicron 9.0")


def test_a_closed_pipe_is_no_error(log):
    result = subprocess.run(
        f"'{sys.executable}' -P -m unicron.cli.main replay '{log}' --verify | head -c 1",
        shell=True,
        text=True,
        capture_output=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert result.stderr == ""


# --- one record, one line ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (r.TaskWeightSet(task=3, weight=2.5, reason="deadline"), "task 3 weight 2.5: deadline"),
        (
            r.TaskOutputSet(task=3, output="/new", reason="full", who="ana", role="operate"),
            "task 3 saves to /new: full; by ana, operate",
        ),
        (
            r.CheckpointFailed(
                task=3,
                rank=1,
                attempt=2,
                generation=4,
                step_version=50,
                what="checkpoint",
                path="/o/gen-4/iter-50",
                why="No space left on device",
                errno="ENOSPC",
                final=True,
            ),
            "task 3 rank 1.2 step 50, final: checkpoint /o/gen-4/iter-50 failed: "
            "No space left on device",
        ),
        (r.HealingFrozen(reason="by ana"), "healing is paused: by ana"),
        (r.HealingResumed(), "healing is resumed"),
        (
            r.IncidentAcknowledged(of=7, reason="a fan", who="ana", role="operate"),
            "inc-7 is known: a fan; by ana, operate",
        ),
        (r.NodeDrained(node="n3", reason="thermal"), "n3 is drained: thermal"),
        (r.NodeUndrained(node="n3"), "n3 may have tasks again"),
        (
            r.TokenChanged(
                act="enrolled", name="n3", token_role="node", who="join-n3", role="join"
            ),
            "enrolled the token n3, role node; by join-n3, join",
        ),
        (
            r.DeadLettersHandled(act="dropped", num=5, numbers=(3, 4, 9, 11), reason="junk"),
            "dropped dead letters 3, 4, 9 and 2 more: junk",
        ),
        (
            r.DeadLettersHandled(act="replayed", num=1, numbers=(7,), who="ann", role="operate"),
            "replayed dead letter 7; by ann, operate",
        ),
        (r.FaultRequested(what="stop", task=3, rank=1), "stop task 3 rank 1 for good"),
        (
            r.FaultRequested(what="node", node="n2", reason="to see"),
            "kill the agent of n2 and its ranks: to see",
        ),
        (
            o.InjectFault(
                nodes=("n1",), what="stop", task=3, rank=1, attempt=2, incarnation=9, stop_s=2.5
            ),
            "on purpose: stop task 3 rank 1.2 for 2.5 s",
        ),
        (
            d.OrderSuppressed(task=3, what="start rank 1 on n1/0", why="observing"),
            "task 3 start rank 1 on n1/0: observing",
        ),
        (
            o.Quiesce(nodes=("n1",), task=3, generation=2, mode="boundary", ranks=(0,), save=True),
            "task 3 generation 2 boundary, rank 0, saved first",
        ),
        (r.PolicySet(policy=Policy(observe=True)), "silence 5 s, 3 restarts, OBSERVING"),
        (
            r.PolicySet(policy=Policy(copies_bytes_max=3, quotas={"red": 2})),
            "silence 5 s, 3 restarts, quotas {'red': 2}, copies_bytes_max 3",
        ),
        (
            d.PlanChosen(
                trigger="node n3 drained",
                num_slots=4,
                waf=6e9,
                ideal_waf=8e9,
                objective=1,
                alternatives=(),
                allocations=(d.Allocation(3, 4, 2, 6e9),),
            ),
            "node n3 drained: 4 slots, task:slots 3:2, WAF 6 GFLOP/s, 75 % of ideal",
        ),
    ],
)
def test_the_line_of_an_operators_request(body, told):
    record = Record(
        seq=7,
        epoch=1,
        at_s=1e9,
        occurred_s=1e9,
        source="heart",
        source_seq=0,
        cause=0,
        incident=0,
        body=body,
    )
    assert line(codec.to_plain(record)).split(maxsplit=3)[3] == told


def test_a_long_ordinary_line_fits_a_wide_terminal():
    body = r.Reconfigured(
        task=12,
        rank=10,
        attempt=2,
        generation=13,
        step_version=10_041,
        kept_micro_batches=(1,) * 12,
        remaining_micro_batches=(1,) * 16,
        reassigned_micro_batches=(1, 2),
        source=3,
        received_bytes=11_234_567,
        down_s=0.0123,
        up_s=0.0854,
        settle_s=0.0141,
    )
    record = Record(
        seq=4812,
        epoch=1,
        at_s=1e9,
        occurred_s=1e9,
        source="n1/7",
        source_seq=9,
        cause=4811,
        incident=4790,
        body=body,
    )
    assert len(line(codec.to_plain(record))) <= 160


# --- closed standard streams ---------------------------------------------------------------------
ALL_CLOSED = "<&- >&- 2>&-"


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        pytest.param(
            words,
            closed,
            marks=[pytest.mark.thorough] * (closed != ALL_CLOSED and words != "classify LOG"),
        )
        for closed in ("<&-", ">&-", "2>&-", ALL_CLOSED)
        for words in ("classify LOG", "classify", "--version", "doctor", "locate none", "status")
    ],
)
def test_a_command_survives_closed_streams(words: str, closed: str, tmp_path: Path) -> None:
    log = "CUDA error: unknown error\n"
    (tmp_path / "LOG").write_text(log, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" {words} {closed}', str(Path(sys.executable).parent / "unicron")],
        cwd=tmp_path,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == {"locate none": 2, "status": 3}.get(words, 0)
    assert (tmp_path / "LOG").read_text(encoding="utf-8") == log
