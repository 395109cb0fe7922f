"""Looking at a state folder that somebody else has made runs nothing, and asks nobody."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import in_process
from unicron.cli.cluster import processes
from unicron.cli.cluster.state_dir import StateDir, write_json
from unicron.events.log.append_only_file import STRANGE_HINT

from .test_local_cluster import Cluster, until

NOBODY = 65534
EVIL = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) {
  FILE *file = fopen("MARK", "w"); if (file) { fputs("it ran", file); fclose(file); } }
int ValkeyModule_OnLoad(void) { return 0; }
int RedisModule_OnLoad(void) { return 0; }
"""
LOOKS = (
    ("view", "DIR", "--print"),
    ("status",),
    ("status", "--at", "3"),
    ("history",),
    ("tail",),
    ("incident",),
    ("export", "OUT"),
    ("replay", "--live"),
    ("replay", "DIR"),
    ("log", "status"),
)
ACTS = (
    ("up", "--agents", "1"),
    ("up", "-d"),
    ("down",),
    ("control-plane",),
    ("agent", "--node", "n1"),
    ("token", "list"),
    ("log", "restore"),
    ("log", "prune", "--keep", "1"),
    ("freeze",),
    ("doctor",),
)


def look(folder: Path, words: tuple[str, ...], tmp_path: Path) -> Any:
    named = {"DIR": str(folder), "OUT": str(tmp_path / "out.jsonl")}
    if "DIR" in words:
        return Cluster(tmp_path / "other")(*[named.get(word, word) for word in words])
    return Cluster(folder)(*[named.get(word, word) for word in words])


def copy(folder: Path, to: Path) -> None:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.sock", "*.shim"))


def resp(*words: str) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(
        b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words
    )


@pytest.fixture(scope="module")
def cluster_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a cluster whose processes were all killed; nothing of its log is sealed."""
    cluster = Cluster(tmp_path_factory.mktemp("crashed") / "state")
    try:
        assert cluster.up().returncode == 0
        until(lambda: json.loads(cluster("status", "-o", "json").stdout)["nodes"] != [])
        seq = json.loads(cluster("status", "-o", "json").stdout)["cluster"]["seq"]
        (cluster.state.path.parent / "seq").write_text(str(seq))
        cluster.kill("up")
        for pid in cluster.pids().values():
            os.kill(pid, signal.SIGKILL)
        until(lambda: not cluster.pids())
        yield cluster.state.path
    finally:
        cluster("down")


def test_ones_own_folder_is_read_after_a_crash(cluster_folder: Path, tmp_path: Path) -> None:
    assert not list((cluster_folder / "log").glob("*.segment"))
    copy(cluster_folder, tmp_path / "copy")
    for folder in (cluster_folder, tmp_path / "copy"):
        shown = look(folder, ("status", "-o", "json"), tmp_path)
        seq = json.loads(shown.stdout)["cluster"]["seq"]
        assert seq >= int((cluster_folder.parent / "seq").read_text())
        lines = look(folder, ("tail", "-o", "jsonl"), tmp_path).stdout.splitlines()
        assert [json.loads(line)["seq"] for line in lines] == list(range(1, seq + 1))
        folded = look(folder, ("replay", "DIR", "-o", "json"), tmp_path)
        assert json.loads(folded.stdout)["cluster"]["seq"] == seq
        assert look(folder, ("replay", "DIR", "--verify"), tmp_path).returncode == 0
        assert "cut" not in shown.stderr + folded.stderr


def test_no_hint_starts_a_cluster_on_a_folder_of_others(
    cluster_folder: Path, tmp_path: Path
) -> None:
    """On a copy, or a folder of another host; on one's own folder it does."""
    folder = tmp_path / "state"
    copy(cluster_folder, folder)
    for where, is_own in ((cluster_folder, True), (folder, False)):
        for one in (
            ("log", "dead-letters"),
            ("cancel", "1"),
            ("plan", "--without", "n1"),
            ("freeze",),
        ):
            refused = look(where, one, tmp_path)
            assert refused.returncode == 3, (one, refused)
            hint = refused.stderr.splitlines()[-1]
            assert ("unicron up" in hint) == is_own, (one, hint)
            assert (f"unicron replay {where} shows its log" in hint) != is_own, (one, hint)
    for path in folder.glob("control_plane*.json"):
        path.unlink()
    (folder / "log.json").write_text(json.dumps({"host": "elsewhere", "folder": str(folder)}))
    hint = look(folder, ("freeze",), tmp_path).stderr.splitlines()[-1]
    assert "it was written on elsewhere" in hint
    assert "unicron up" not in hint


def test_a_log_that_was_cut_is_told(cluster_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    copy(cluster_folder, folder)
    (path,) = (folder / "server" / "appendonlydir").glob("*.incr.aof")
    os.truncate(path, path.stat().st_size // 2)
    for words in (("status", "--at", "1"), ("replay", "DIR")):
        shown = look(folder, words, tmp_path)
        assert shown.returncode == 0, shown
        assert f"note: {path.name} of the server ends within a command" in shown.stderr
    path.unlink()
    os.mkfifo(path, 0o600)
    refused = look(folder, ("status",), tmp_path)
    assert refused.returncode == 2
    assert f"{path} is no file of the log: a fifo, not a regular file" in refused.stderr


def test_down_ends_no_process_that_only_a_file_names(tmp_path: Path) -> None:
    """Whoever has sent the folder knows the process: it is his, or he is on this host."""
    cluster = Cluster(tmp_path / "sent")
    with subprocess.Popen(["sleep", "60"]) as stranger:
        try:
            cluster.state.create()
            (tmp_path / "his").mkdir()
            his = StateDir(tmp_path / "his" / "state")
            his.create()
            processes.record(his, "agent-n1", stranger.pid)
            shutil.copytree(his.pids, cluster.state.pids, dirs_exist_ok=True)
            note = json.loads((his.pids / "agent-n1.json").read_bytes())
            for name in ("control-plane", "up"):  # as 0.3.0 has written them
                write_json(cluster.state.pids / f"{name}.json", {**note, "folder": None})
            assert cluster("down").returncode == 0
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_a_copy_of_the_folder_of_a_running_cluster_is_no_way_to_it(tmp_path: Path) -> None:
    cluster, to = Cluster(tmp_path / "state"), tmp_path / "copy"
    try:
        assert cluster.up().returncode == 0
        shutil.copytree(cluster.state.path, to, ignore=shutil.ignore_patterns("*.sock", "*.shim"))
        pids = cluster.pids()
        for words in (("freeze",), ("down",)):
            look(to, words, tmp_path)
            assert cluster.pids() == pids
        healing = json.loads(cluster("status", "-o", "json").stdout)["cluster"]["healing"]
        assert healing == "on"
    finally:
        cluster("down")


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_files_that_load_a_module_run_nothing(cluster_folder: Path, tmp_path: Path) -> None:
    """Alone, or behind a good log; the module has a name in the files' folder."""
    mark, folder = tmp_path / "mark", tmp_path / "state"
    copy(cluster_folder, folder)
    files = folder / "server" / "appendonlydir"
    (tmp_path / "evil.c").write_text(EVIL.replace("MARK", str(mark)))
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(files / "evil.so"), str(tmp_path / "evil.c")],
        check=True,
        timeout=60,
    )
    (files / "evil.so").chmod(0o755)
    evil = resp("SELECT", "0") + resp("MODULE", "LOAD", "appendonlydir/evil.so")
    with next(files.glob("*.incr.aof")).open("ab") as file:
        file.write(evil)
    for words in LOOKS:
        refused = look(folder, words, tmp_path)
        assert not mark.exists(), words
        assert (refused.returncode, refused.stdout) == (2, ""), (words, refused)
        line, hint = refused.stderr.strip().splitlines()
        assert "has the command MODULE" in line
        assert hint == f"hint: {STRANGE_HINT}"
    for words in (("up", "--agents", "1"), ("control-plane",)):
        refused = look(folder, words, tmp_path)
        assert not mark.exists(), words
        assert refused.returncode == 2, (words, refused)
        assert "has the command MODULE" in refused.stderr.splitlines()[-2]
        assert "no server was started on it" in refused.stderr.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(cluster_folder: Path, tmp_path: Path) -> None:
    for part in ("", "server/appendonlydir/appendonly.aof.manifest"):
        folder = tmp_path / f"state{len(part)}"
        copy(cluster_folder, folder)
        os.chown(folder / part, NOBODY, NOBODY)
        for words in LOOKS:
            refused = look(folder, words, tmp_path)
            assert (refused.returncode, refused.stdout) == (2, ""), (words, refused)
            assert len(refused.stderr.strip().splitlines()) == 2, refused.stderr
            assert (
                f"is no file of the log: belongs to user {NOBODY}"
                if part
                else f"{folder} belongs to user {NOBODY}, not to 0"
            ) in refused.stderr
            assert "let the owner export" in refused.stderr or "let its owner" in refused.stderr
    for words in ACTS:
        refused = look(tmp_path / "state0", words, tmp_path)
        assert (refused.returncode, refused.stdout) == (2, ""), (words, refused)
        assert "belongs to user 65534, not to 0" in refused.stderr, words


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_in_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    for words in (*LOOKS, *ACTS):
        refused = look(tmp_path / "state", words, tmp_path)
        assert (refused.returncode, refused.stdout) == (2, ""), (words, refused)
        line, hint = refused.stderr.strip().splitlines()
        assert f"has mode 0{mode:o}: others may write in it" in line
        assert "chmod go-w" in hint
    assert list((tmp_path / "state").iterdir()) == []


def test_files_of_a_folder_that_have_no_end_are_not_read(
    cluster_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "state"
    copy(cluster_folder, folder)
    for name in ("control_plane.json", "cluster.json", "log.json", "pids/agent-n1.json"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/zero")
    (folder / "up.lock").unlink(missing_ok=True)
    os.mkfifo(folder / "up.lock")
    shown = look(folder, ("status", "-o", "json"), tmp_path)
    assert json.loads(shown.stdout)["cluster"]["seq"] > 0, shown


def test_segments_elsewhere_are_read_only_if_named(cluster_folder: Path, tmp_path: Path) -> None:
    folder, mine = tmp_path / "state", tmp_path / "mine"
    copy(cluster_folder, folder)
    mine.mkdir()
    (folder / "log.json").write_text(json.dumps({"cluster": "default", "segments": str(mine)}))
    for words in (*LOOKS, ("log", "prune", "--keep", "1")):
        refused = look(folder, words, tmp_path)
        assert (refused.returncode, refused.stdout) == (2, ""), (words, refused)
        assert f"says that the log is at {mine}, which is read only if you name" in refused.stderr


def test_a_url_that_a_folder_names_is_not_asked(cluster_folder: Path, tmp_path: Path) -> None:
    folder, asked = tmp_path / "state", list[bytes]()
    copy(cluster_folder, folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/log"

        def listen() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                asked.append(link.recv(100))
                link.close()

        threading.Thread(target=listen, daemon=True).start()
        (folder / "log.json").write_text(json.dumps({"cluster": "default", "segments": url}))
        for words in LOOKS:
            refused = look(folder, words, tmp_path)
            assert (refused.returncode, refused.stdout) == (2, ""), (words, refused)
            line, hint = refused.stderr.strip().splitlines()
            assert f"says that the log is at {url}, which is read only if you name it" in line
            assert hint == f"hint: if that is yours: export UNICRON_SEGMENTS={url}"
    assert asked == []


def test_segments_that_are_named_are_read(cluster_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    copy(cluster_folder, folder)
    (tmp_path / "elsewhere").mkdir()
    (folder / "log.json").write_text(json.dumps({"cluster": "default", "segments": "s3://b/log"}))
    shown = in_process(
        ("log", "status", "-o", "json"),
        None,
        {**Cluster(folder).environment(), "UNICRON_SEGMENTS": str(tmp_path / "elsewhere")},
    )
    assert json.loads(shown.stdout)["folder"] == str(tmp_path / "elsewhere"), shown
