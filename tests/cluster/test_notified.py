"""A webhook through one incident of a real cluster: a lost node, and its return."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_cluster import RealCluster
from twins import small
from unicron.events.private_files import write_private

SECRET = "T0-the-secret-path"


class Hook(BaseHTTPRequestHandler):
    """Keeps each message."""

    told: list[Any]

    def do_POST(self) -> None:
        self.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        assert self.path == f"/{SECRET}"
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.mark.thorough
def test_a_lost_node_is_told_once_and_its_return_once(tmp_path: Path) -> None:
    told: list[Any] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Kept", (Hook,), {"told": told}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    write_private(tmp_path / "hook", f"http://127.0.0.1:{server.server_port}/{SECRET}".encode())
    cluster = RealCluster(tmp_path / "cluster", num_control_planes=2)
    local = cluster.local
    local.wanted = msgspec.structs.replace(local.wanted, notify=str(tmp_path / "hook"))
    try:
        cluster.start()
        task = cluster.submit(small("job", tmp_path / "out"))
        cluster.wait_whole(task, 4)
        cluster.kill_node("n2")
        cluster.wait(lambda: told or None, "a message")
        # the next leader knows that it was told
        cluster.wait(lambda: cluster.told(0, "PersonNotified") or None, "its record")
        epoch = cluster.client().get("/v1/health")["epoch"]
        assert cluster.client().post(f"/v1/handover?epoch={epoch}", {})["leader"]
        cluster.start_agent("n2")
        cluster.wait(lambda: len(told) > 1 or None, "the second message")
        cluster.wait_whole(task, 4)
        assert [(x.body.opened, x.body.over) for x in cluster.told(0, "PersonNotified")] == [
            (("lost n2",), ()),
            ((), ("lost n2",)),
        ]
        first, last = told
        assert first["text"].startswith("Unicron, cluster default:\nNEEDS YOU n2 lost for ")
        assert last["text"] == "Unicron, cluster default:\nNO LONGER lost n2"
        for file in cluster.state.path.rglob("*"):
            if file.is_file():
                assert SECRET.encode() not in file.read_bytes(), file
    finally:
        cluster.stop()
        server.shutdown()
