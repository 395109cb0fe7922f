"""`logs`: any output arrives whole and in parts, from a file here and by the agent of its node."""

from __future__ import annotations

import codecs
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron.cli.commands import logs
from unicron.events.bounded_file import HEAD_BYTES, BoundedFile
from unicron.events.log.port import FileRequest
from unicron.workers.agent.output_files import read_part

LINES = st.lists(
    st.one_of(
        st.text("aé€😀", max_size=30),
        st.builds(
            lambda text, num: text * num,
            st.text("aé€😀", min_size=1, max_size=3),
            st.integers(1, 3 * logs.CHUNK_BYTES),
        ),
    ),
    max_size=40,
)


class Far(type(Path())):
    """A file that this host does not have."""

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return False


class Agents:
    """The control plane's answer, with the part that an agent reads."""

    def get(self, path: str, *, file: str, offset: int) -> dict[str, Any]:
        part = read_part(Path(file).parent, FileRequest(number="1", path=file, offset=offset))
        assert not part.error
        text, num = codecs.utf_8_decode(part.data, "replace")
        return {"text": text, "begin": part.begin, "end": part.begin + num}


@settings(max_examples=60)
@given(lines=LINES, ends=st.booleans(), tail=st.none() | st.integers(0, 50))
def test_every_line_is_printed_once_and_whole(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends: bool, tail: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("logs") / "0.log"
        path.write_text("\n".join(lines) + "\n" * (ends and bool(lines)), encoding="utf-8")
        whole = lines if ends or lines[-1:] != [""] else lines[:-1]
        last = whole if tail is None else whole[len(whole) - min(tail, len(whole)) :]
        for one in (path, Far(path)):
            found: list[str] = []
            patch.setattr(logs.console, "write", found.append)
            printer = logs._Printer(prefixed=True)
            file = logs._File(rank=3, attempt=2, node="n1", path=one)
            logs._show(Agents(), printer, [file], whole=True, tail=tail)  # type: ignore[arg-type]
            printer.end()
            assert "".join(found) == "".join(f"3.2 {line}\n" for line in last)


def test_the_first_part_of_a_long_line_is_printed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    path.write_bytes(b"x" * (1 << 26))
    file = logs._File(rank=0, attempt=1, node="n1", path=path)
    assert len(next(text for text in file.texts(Agents(), whole=True) if text)) <= (  # type: ignore[arg-type]
        2 * logs.CHUNK_BYTES
    )
    assert file.offset <= 2 * logs.CHUNK_BYTES


def test_parts_of_two_files_do_not_share_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: list[logs._File] = []
    for rank in (0, 1):
        path = tmp_path / f"{rank}.log"
        path.write_text(f"{rank}" * (1 << 17))
        files.append(logs._File(rank=rank, attempt=1, node="n1", path=path))
    printer = logs._Printer(prefixed=True)
    logs._show(Agents(), printer, files, whole=False)  # type: ignore[arg-type]
    for file in files:
        file.path.write_bytes(file.path.read_bytes() + "é".encode()[:1])
    logs._show(Agents(), printer, files, whole=False)  # type: ignore[arg-type]
    for file in files:
        file.path.write_bytes(file.path.read_bytes() + "é".encode()[1:] + b"\n")
    logs._show(Agents(), printer, files, whole=True)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert {line[:4] for line in lines} == {"0.1 ", "1.1 "}
    assert {len(set(line[4:]) - {"é"}) <= 1 for line in lines} == {True}
    assert sum(line.count("0") - 1 for line in lines if line[0] == "0") >= 1 << 17
    assert [line[0] for line in lines if line.endswith("é")] == ["0", "1"]


def printed(path: Path, patch: pytest.MonkeyPatch, tail: int | None = None) -> str:
    found: list[str] = []
    patch.setattr(logs.console, "write", found.append)
    printer = logs._Printer(prefixed=False)
    file = logs._File(rank=0, attempt=1, node="n1", path=path)
    logs._show(Agents(), printer, [file], whole=True, tail=tail)  # type: ignore[arg-type]
    printer.end()
    return "".join(found)


def test_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node names the file."""
    os.mkfifo(tmp_path / "0.log")
    assert printed(tmp_path / "0.log", monkeypatch) == ""


@pytest.mark.parametrize("kind", [Path, Far])
def test_a_gap_is_told_between_head_and_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Path]
) -> None:
    path, text = tmp_path / "0.log", "".join(f"é {number:08}\n" for number in range(2_000_000))
    path.write_bytes(data := text.encode())
    BoundedFile(path, 8 << 20).look()
    head, _, rest = printed(kind(path), monkeypatch).partition("\n[unicron: ")
    told, _, end = rest.partition(" bytes were dropped here, see output_bytes_max]\n")
    begin = len(data) - len(end.encode("utf-8"))
    assert text.startswith(head)
    assert HEAD_BYTES - 4 <= len(head.encode()) <= HEAD_BYTES
    assert data.endswith(end[2:].encode()), "behind the first, perhaps cut, character"
    assert abs(int(told.replace(",", "")) - (begin - HEAD_BYTES)) <= 8
    lines = printed(kind(path), monkeypatch, tail=1000).splitlines()
    assert lines == text.splitlines()[-1000:]
    lines = printed(kind(path), monkeypatch, tail=10_000_000).splitlines()
    assert lines[0] == f"[unicron: {told} bytes were dropped here, see output_bytes_max]"
    assert lines[2:] == end.splitlines()[1:], "as many lines as are behind the gap"


@pytest.mark.parametrize("kind", [Path, Far])
def test_a_file_that_grows_is_printed_up_to_its_end_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Path]
) -> None:
    """A process that prints without a pause: it was printed from its first line on, for ever."""
    path, ends, grows = tmp_path / "0.log", threading.Event(), threading.Event()
    path.write_bytes(b"".join(b"%08d\n" % number for number in range(20_000)))

    def grow() -> None:
        with path.open("ab", buffering=0) as file:
            while not ends.is_set():
                file.write(b"more\n" * 1000)
                grows.set()

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        assert grows.wait(60.0)
        for tail in (3, 3, 3):
            assert len(printed(kind(path), monkeypatch, tail).splitlines()) <= tail + 1
        assert printed(kind(path), monkeypatch).startswith("00000000\n00000001\n")
    finally:
        ends.set()
        writer.join()


@pytest.mark.parametrize("kind", [Path, Far])
def test_following_goes_on_across_a_gap_and_a_new_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Path]
) -> None:
    path, found = tmp_path / "0.log", list[str]()
    monkeypatch.setattr(logs.console, "write", found.append)
    monkeypatch.setattr(logs, "RESCAN_S", 0.0)
    printer = logs._Printer(prefixed=False)
    file = logs._File(rank=0, attempt=1, node="n1", path=kind(path))
    bounded: BoundedFile | None = None
    with path.open("ab", buffering=0) as log:
        for data in (
            b"first\nbegun \xc3",
            b"\xa9\n" + b"x" * 1000 + b"\n" + b"z" * (20 << 20) + b"\nlast\n",
        ):
            log.write(data)
            bounded = bounded or BoundedFile(path, 8 << 20)
            bounded.look()
            logs._show(Agents(), printer, [file], whole=False)  # type: ignore[arg-type]
    text = "".join(found)
    assert text.startswith("first\nbegun é\n" + "x" * 1000 + "\nzzz")
    assert text.count(" bytes were dropped here") == 1
    assert text.endswith("zzz\nlast\n")
    found.clear()
    path.write_bytes(b"anew\n")
    logs._show(Agents(), printer, [file], whole=False)  # type: ignore[arg-type]
    assert "".join(found) == "anew\n"
