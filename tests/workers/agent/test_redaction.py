"""What a rank prints reaches the log only where it explains an end, and without secrets."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from agent_driver import LocalNode, local_node, python, train, until_text
from memory_log import MemoryLog
from unicron.events.records.codec import encode_record
from unicron.events.records.reports import RankErrored, RankExited, RankStarted
from unicron.events.spec.policy import REDACT
from unicron.workers.agent.processes.exit_report import TAIL_BYTES
from unicron.workers.agent.processes.rank_process import WORD, Redactor

pytestmark = pytest.mark.usefixtures("nothing_left")
CANARY = "canary-5b1f"
FAILS = """
import os, sys
print("the key is", os.environ["MY_API_KEY"], repr(dict(os.environ)))
sys.stdout.flush()
raise RuntimeError("cannot log in with " + os.environ["MY_API_KEY"])
"""
ERRS = """
import os, socket, sys
from unicron.events.records.reports import RankErrored
from unicron.workers.ipc.pipe_protocol import Frame, pack
link = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
key = os.environ["MY_API_KEY"]
link.sendall(pack(Frame(body=RankErrored(task=1, rank=0, attempt=1, generation=1, iteration=1,
                                         error="E", text="no access with " + key))))
sys.exit(1)
"""


def assert_no_canary(node: LocalNode, canary: str = CANARY) -> None:
    for record in node.leader.records:
        assert canary.encode() not in encode_record(record), record.kind


def test_names_select_the_values() -> None:
    redact = Redactor(
        {
            "AWS_SECRET_ACCESS_KEY": "abc/def+1",
            "db_password": "abc/def+12",
            "HOME": "/home/me",
            "TOKENIZERS_PARALLELISM": "false",
            "MY_TOKEN": "two\nlines",
        },
        REDACT,
    ).text
    assert redact("of abc/def+12, abc/def+1; /home/me false") == (
        f"of {WORD}, {WORD}; /home/me false"
    )
    assert redact("two\nlines") == WORD
    assert redact(repr({"MY_TOKEN": "two\nlines"})) == f"{{'MY_TOKEN': '{WORD}'}}"
    assert Redactor({"MY_TOKEN": "some-value"}, ()).text("some-value") == "some-value"


async def test_a_secret_that_a_rank_prints_is_not_in_the_log(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    await node.start(python(FAILS))
    (exited,) = await node.leader.wait(RankExited)
    assert f"the key is {WORD}" in exited.tail
    assert exited.cause == f"RuntimeError: cannot log in with {WORD}"
    assert_no_canary(node)
    (started,) = node.leader.all(RankStarted)
    assert CANARY in Path(started.log_path).read_text(), "the file on the node is the rank's own"


async def test_no_part_of_a_secret_is_left_where_the_output_is_cut(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    await node.start(
        python(f"import os, sys\nsys.exit(os.environ['MY_API_KEY'] + 'x' * {TAIL_BYTES - 5})")
    )
    (exited,) = await node.leader.wait(RankExited)
    assert set(exited.tail) <= {*WORD, "x", "\n"}
    assert_no_canary(node, CANARY[-4:])


async def test_a_ranks_own_error_report_is_redacted(
    memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    async with local_node(memory, tmp_path, rank_argv=(sys.executable, "-c", ERRS)) as node:
        await node.start(train(0))
        (exited,) = await node.leader.wait(RankExited)
        (errored,) = node.leader.all(RankErrored)
        assert (errored.text, exited.cause) == (f"no access with {WORD}",) * 2
        assert_no_canary(node)


async def test_the_list_of_names_is_that_of_the_policy(
    memory: MemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", CANARY)
    monkeypatch.setenv("OURS", "hidden-too")
    async with local_node(memory, tmp_path, redact=("our*",)) as node:
        await node.start(python("import os, sys; sys.exit(str(dict(os.environ)))"))
        (exited,) = await node.leader.wait(RankExited)
        assert CANARY in exited.tail
        assert_no_canary(node, "hidden-too")


async def test_output_that_explains_no_end_stays_on_the_node(node: LocalNode) -> None:
    await node.start(python(f"print('{CANARY}')"))
    await node.leader.wait(RankExited)
    await node.start(python(f"import time; print('{CANARY}', flush=True); time.sleep(60)"), rank=1)
    started = (await node.leader.wait(RankStarted, 2))[1]
    await until_text(started.log_path)
    await node.stop_rank(1)
    exits = await node.leader.wait(RankExited, 2)
    assert [(one.exit_code, one.signal, one.tail) for one in exits] == [
        (0, None, ""),
        (None, signal.SIGTERM, ""),
    ]
