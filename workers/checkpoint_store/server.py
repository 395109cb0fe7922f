"""The checkpoint store process, `python -m unicron.workers.checkpoint_store.server`.

Options: `--fd N --listen M --start NUMBER`. It serves the listening socket M, which its agent also
holds, so that a restarted store has the same address. Over socket N the agent sends the store's
secret (protocol.py), then the number of each task that has ended. The store sends the number of a
task that has lost all its checkpoints before its end. With its first checkpoint, it sends
FIRST_CHECKPOINT_CODE. It exits with its agent.

Environment: UNICRON_COPIES_BYTES_MAX (store.py).
"""

import argparse
import contextlib
import errno
import mmap
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NoReturn

from ...events.log.identity import SIGNATURE_BYTES
from ...events.process_io import LogStream, Seldom
from ..host import linux
from . import protocol
from .protocol import (
    Checksum,
    ListRequest,
    Offer,
    PiecesRequest,
    Refused,
    ShareRequest,
    StoredReply,
    TransferError,
)
from .store import CheckpointStore, StoredCheckpoint, StoreRefused, bytes_max

CONNECTIONS_NUM_MAX = 64
"""Connections served at once; further ones wait in the socket's queue."""
ACCEPT_PAUSE_S = 0.1
"""Time between two attempts to accept a connection after a failure."""
LINE_S = 10.0
LINE_CHARS_MAX = 300
WHO_NUM_MAX = 100
NICE_NUM = 5
"""Training has priority on a shared core."""


def main() -> None:
    """Serve until the agent's end of the socket is closed."""
    parser = argparse.ArgumentParser(prog="unicron.workers.checkpoint_store.server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--start", type=int, required=True)
    args = parser.parse_args()
    agent, listener = socket.socket(fileno=args.fd), socket.socket(fileno=args.listen)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.set_process_name("ckpt_store")
    os.nice(NICE_NUM)
    with contextlib.suppress(OSError):
        linux.prefer_oom_kill()
    secret = agent.recv(SIGNATURE_BYTES)

    def notify(task: int) -> None:
        agent.send(task.to_bytes(protocol.TASK_BYTES, "big"))

    store = CheckpointStore(
        bytes_max(os.environ),
        notify,
        lambda: notify(protocol.FIRST_CHECKPOINT_CODE),
        start=args.start,
    )
    log_line(f"memory for checkpoints: {store.bytes_max} bytes")
    threading.Thread(target=_serve_for_ever, args=(listener, store, secret), daemon=True).start()
    while data := agent.recv(protocol.TASK_BYTES):
        store.forget(int.from_bytes(data, "big"))
    os._exit(0)


def log_line(what: str) -> None:
    text = what[:LINE_CHARS_MAX]
    LogStream(sys.stderr).write((text if text.isprintable() else ascii(text)[1:-1]) + "\n")


class FailureLog:
    """Logs a failure once when it begins, and once when it is over: of each address and task at
    most once in LINE_S, and of all but the last WHO_NUM_MAX of them together."""

    def __init__(self) -> None:
        self._seldom: dict[str, Seldom] = {}
        self._others = Seldom(LINE_S)
        self._failing: set[str] = set()
        self._lock = threading.Lock()

    def failed(self, who: str, why: str) -> None:
        with self._lock:
            if who not in self._failing and self._may_log(who):
                self._failing.add(who)
                log_line(f"{who}: {why}")

    def succeeded(self, who: str) -> None:
        with self._lock:
            if who in self._failing:
                self._failing.discard(who)
                log_line(f"{who}: recovered")

    def _may_log(self, who: str) -> bool:
        if who not in self._seldom and len(self._seldom) >= WHO_NUM_MAX:
            if not self._others.due():
                return False
            oldest = next(iter(self._seldom))
            del self._seldom[oldest]
            self._failing.discard(oldest)
        return bool(self._seldom.setdefault(who, Seldom(LINE_S)).due())


def _serve_for_ever(listener: socket.socket, store: CheckpointStore, secret: bytes) -> NoReturn:
    """Serve; exit if serving ends, so that the agent starts another store."""
    try:
        serve(listener, store, secret)
        log_line("the socket is closed")
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(1)


def serve(listener: socket.socket, store: CheckpointStore, secret: bytes) -> None:
    """Serve each connection in a thread, until the listener is closed."""
    free, failures = threading.Semaphore(CONNECTIONS_NUM_MAX), FailureLog()
    while True:
        free.acquire()
        try:
            connection, (host, *_) = listener.accept()
            try:
                args = (connection, host, store, secret, free, failures)
                threading.Thread(target=_serve_connection, args=args, daemon=True).start()
            except RuntimeError:
                connection.close()
                raise
        except (OSError, RuntimeError) as error:  # out of descriptors or threads
            free.release()
            if isinstance(error, OSError) and error.errno in (errno.EBADF, errno.EINVAL):
                return
            failures.failed("accept", str(error))
            time.sleep(ACCEPT_PAUSE_S)
        else:
            failures.succeeded("accept")


def _serve_connection(
    connection: socket.socket,
    host: str,
    store: CheckpointStore,
    secret: bytes,
    free: threading.Semaphore,
    failures: FailureLog,
) -> None:
    try:
        with connection:
            handle_connection(connection, store, secret, failures)
    except (OSError, TransferError) as error:
        failures.failed(host, f"connection failed: {error or type(error).__name__}")
    except Exception as error:  # noqa: BLE001 - what one client sends ends its own connection
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        failures.failed(host, f"connection failed: {type(error).__name__} at {at}: {error}")
    else:
        failures.succeeded(host)
    finally:
        free.release()


def handle_connection(
    connection: socket.socket, store: CheckpointStore, secret: bytes, failures: FailureLog
) -> None:
    """Serve one connection, from the greeting on. Raises OSError, TransferError."""
    key = protocol.authenticate(connection, secret)
    if key is None:
        raise TransferError("client without a key")
    message = protocol.receive(connection, Offer, ListRequest, ShareRequest)
    if why := protocol.violation(key, message):
        protocol.send(connection, Refused(why=why))
        raise TransferError(f"task {key.task}: {why}")
    match message:
        case Offer() as offer:
            _receive(connection, store, offer, failures)
        case ListRequest() as request:
            protocol.send(
                connection, protocol.List(offers=tuple(one.offer for one in store.of(request.task)))
            )
        case ShareRequest() as request:
            _send(connection, store, request)


def _receive(
    connection: socket.socket, store: CheckpointStore, offer: Offer, failures: FailureLog
) -> None:
    task = f"task {offer.task}"
    try:
        memory = store.reserve(offer)
    except StoreRefused as error:
        failures.failed(task, f"refused: {error}")
        protocol.send(connection, Refused(why=str(error)))
        return
    answer: StoredReply | Refused = StoredReply(start=store.start)
    try:
        protocol.send(connection, protocol.Go())
        store.add(_receive_share(connection, offer, memory))
    except StoreRefused as error:
        failures.failed(task, f"refused: {error}")
        answer = Refused(why=str(error))
    else:
        failures.succeeded(task)
    finally:
        store.cancel(offer, memory)
    protocol.send(connection, answer)


def _receive_share(connection: socket.socket, offer: Offer, memory: mmap.mmap) -> StoredCheckpoint:
    """Receive a share and verify it. Raises OSError, TransferError, StoreRefused."""
    data, begin = memoryview(memory), offer.manifest_bytes
    protocol.read_exactly(connection, data[:begin])
    encoded = bytes(data[:begin])
    manifest = protocol.decode_manifest(encoded, offer.copy_bytes - begin)
    codes: list[int] = []
    for piece in manifest.pieces:
        codes.append(protocol.receive_bytes(connection, data[begin : begin + piece.num_bytes]))
        begin += piece.num_bytes
    received = bytearray(protocol.SUM_BYTES * len(codes))
    protocol.read_exactly(connection, memoryview(received))
    sums, sent = bytes(received), protocol.receive(connection, Checksum).checksum
    if sums != protocol.encode_sums(codes) or sent != protocol.checksum_of(encoded, sums):
        found = protocol.checksum_of(encoded, protocol.encode_sums(codes))
        raise StoreRefused(f"checkpoint altered: received {found}, sent {sent}")
    return StoredCheckpoint(offer=offer, manifest=manifest, sums=sums, checksum=sent, memory=memory)


def _send(connection: socket.socket, store: CheckpointStore, request: ShareRequest) -> None:
    """Send a share's list of pieces, then the pieces that the rank asks for, until it closes."""
    stored = store.find(request)
    if stored is None:
        protocol.send(
            connection,
            Refused(
                why=f"no share {request.share} of task {request.task} generation "
                f"{request.generation} step {request.step_version}"
            ),
        )
        return
    pieces = stored.pieces()
    protocol.send(connection, stored.offer)
    connection.sendall(memoryview(stored.memory)[: stored.offer.manifest_bytes])
    connection.sendall(stored.sums)
    protocol.send(connection, Checksum(checksum=stored.checksum))
    while (wanted := protocol.receive_or_end(connection, PiecesRequest)) is not None:
        for index in wanted.indices:
            if not 0 <= index < len(pieces):
                raise TransferError(f"the share has no piece {index}")
            connection.sendall(pieces[index])


if __name__ == "__main__":
    main()
