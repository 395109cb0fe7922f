"""TLS as a user meets it: `certs init`, a control plane with a certificate, commands and an agent
that trust its authority, and one line for whatever is wrong."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import certificates
import pytest
import redis_with_tls
from certificates import Pair
from cli_process import in_process, refused, unicron
from unicron.cli.cluster.state_dir import read_json, write_json
from unicron.events import tls

if why := certificates.why_not():
    pytest.skip(why, allow_module_level=True)

LIMIT_S = 60.0


class TlsSite:
    """A real control plane at https://127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pair = folder, Pair(folder / "certs")
        self.log = folder / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "unicron.cli.main",
                    "control-plane",
                    "--state",
                    str(folder / "cp"),
                    "--tls-cert",
                    str(self.pair.certificate),
                    "--tls-key",
                    str(self.pair.key),
                ],
                stdout=output,
                stderr=output,
            )
        file = folder / "cp" / "control_plane.json"
        self.wait(file.exists)
        note = read_json(file) or {}
        self.url, self.token = str(note["url"]), str(note["token"])

    def wait(self, holds: object) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():  # type: ignore[operator]
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.05)

    def __call__(
        self, *words: str, url: str = "", env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on another folder, as on another host. An agent has its own process."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
        environment = {
            **clean,
            "UNICRON_STATE": str(self.folder / "elsewhere"),
            "NO_COLOR": "1",
            "UNICRON_TOKEN": self.token,
            **(env or {}),
        }
        words = (*words, "--url", url or self.url)
        if words[0] != "agent":
            return in_process(words, None, environment)
        return subprocess.run(
            [sys.executable, "-P", "-m", "unicron.cli.main", *words],
            text=True,
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env=environment,
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    folder = tmp_path_factory.mktemp("tls")
    made = TlsSite(folder)
    yield made
    made.process.send_signal(signal.SIGTERM)
    made.process.wait(LIMIT_S)
    unicron("down", "--state", str(folder / "cp"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("foreign"), "127.0.0.1")


def test_a_shared_folder_is_enough_on_another_host(site: TlsSite, tmp_path: Path) -> None:
    """The socket is on the control plane's host; the folder has its URL and authority too."""
    note = json.loads((site.folder / "cp" / "control_plane.json").read_text())
    for host, code in ((note["host"], 3), ("another", 0)):
        write_json(
            tmp_path / "control_plane.json",
            {**note, "host": host, "socket": str(tmp_path / "no.sock")},
        )
        ran = unicron("status", "--state", str(tmp_path))
        assert ran.returncode == code, ran.stderr


# --- certs init ---
def test_certs_init_makes_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    made = unicron("certs", "init", "--dir", str(folder), "--host", "cp.site", "--host", "fd00::1")
    assert made.returncode == 0, made.stderr
    files = ["authority.key", "authority.pem", "control-plane.key", "control-plane.pem"]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    authority = folder.joinpath("authority.pem").read_text()
    assert folder.joinpath("control-plane.pem").read_text().endswith(authority)
    assert tls.digest(authority) in made.stderr
    assert "control-plane --tls-cert" in made.stdout
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(unicron("certs", "init", "--dir", str(folder), "--host", "x"), "exists already")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    again = unicron("certs", "init", "--dir", str(folder), "--host", "x", "--force")
    assert again.returncode == 0, again.stderr
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"control-plane.key", "control-plane.pem"}, "the authority stays"


@pytest.mark.parametrize("host", ["a,DNS:b", "", "a b", "a\nb", "-x"])
def test_certs_init_refuses_what_is_no_host(tmp_path: Path, host: str) -> None:
    refused(unicron("certs", "init", "--dir", str(tmp_path / "d"), f"--host={host}"), "neither")
    assert not (tmp_path / "d").exists()


def test_certs_init_without_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(unicron("certs", "init", "--dir", str(tmp_path / "d"), "--host", "a"), "openssl: no")
    assert not list((tmp_path / "d").iterdir())


# --- a control plane that cannot start ---
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("one", "go together"),
        ("missing", "control-plane.pem: No such"),
        ("empty", "no certificate"),
        ("key of others", "others may read it"),
        ("foreign key", "another certificate's"),
        ("no key", "control-plane.key: No such"),
        ("garbage key", "no password"),
    ],
)
def test_unusable_files(tmp_path: Path, foreign: Pair, what: str, words: str) -> None:
    pair = Pair(tmp_path / "certs")
    given = ["--tls-cert", str(pair.certificate), "--tls-key", str(pair.key)]
    if what == "one":
        given = given[:2]
    elif what == "missing":
        pair.certificate.unlink()
    elif what == "empty":
        pair.certificate.write_text("nothing")
    elif what == "key of others":
        pair.key.chmod(0o644)
    elif what == "foreign key":
        pair.key.write_bytes(foreign.key.read_bytes())
    elif what == "no key":
        pair.key.unlink()
    else:
        pair.key.write_text("nothing")
    refused(unicron("control-plane", "--state", str(tmp_path / "s"), *given), words)
    assert not (tmp_path / "s" / "server").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (("control-plane", "--listen", "0.0.0.0", "--advertise", "cp.site"), {}),
        (("control-plane",), {"UNICRON_REDIS_URL": "redis://u:p@192.0.2.1:6379/0"}),
        (("agent", "--url", "http://192.0.2.1:8420"), {"UNICRON_TOKEN": "t"}),
    ],
)
def test_nothing_starts_in_plain_beyond_this_machine(
    tmp_path: Path, words: tuple[str, ...], environment: dict[str, str]
) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    refused(
        subprocess.run(
            [sys.executable, "-P", "-m", "unicron.cli.main", *words, "--state", str(tmp_path)],
            text=True,
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
            env={**clean, **environment},
        ),
        "unencrypted",
    )


# --- commands ---
def test_commands_trust_a_file_or_a_digest(site: TlsSite) -> None:
    for ca in (
        str(site.pair.ca),
        site.pair.digest,
        site.pair.digest[:7] + site.pair.digest[7:].upper(),
    ):
        shown = site("status", "--ca", ca)
        assert shown.returncode == 0, (ca, shown.stderr)
        assert "insecure" not in shown.stdout
        assert site("token", "list", env={"UNICRON_CA": ca}).returncode == 0
    state = site("status", "-o", "json", "--ca", site.pair.digest).stdout
    assert f'"insecure": false, "ca": "{site.pair.digest}"' in state
    local = unicron("status", "--state", str(site.folder / "cp"))
    assert local.returncode == 0, local.stderr


@pytest.mark.parametrize("command", ["status", pytest.param("agent", marks=pytest.mark.thorough)])
def test_what_is_wrong_with_a_server_is_one_line(
    site: TlsSite, foreign: Pair, tmp_path: Path, command: str
) -> None:
    digest, state = site.pair.digest, ("--state", str(tmp_path / "s"))
    wrong_name = site.url.replace("127.0.0.1", "localhost")
    for url, ca, words in (
        ("", "", "unable to get local issuer|self-signed"),
        ("", str(foreign.ca), "refused"),
        ("", foreign.digest, "none of its 2 certificates has the digest"),
        (wrong_name, digest, "certificate is not valid for 'localhost'"),
        ("", "sha256:12", "no digest"),
        ("", str(tmp_path / "no"), "No such file"),
        ("", str(site.pair.key), "no certificate"),
        (site.url.replace("https", "http"), "", "speaks TLS"),
        (site.url.replace("https", "http"), digest, "are for https://"),
    ):
        result = site(command, *state, *["--ca", ca] * bool(ca), url=url)
        refused(result, "")
        assert re.search(words, result.stderr), (words, result.stderr)


@pytest.mark.parametrize("command", ["status", "agent"])
def test_an_expired_certificate(site: TlsSite, tmp_path: Path, command: str) -> None:
    pair = Pair(tmp_path / "certs")
    pair.expire()
    with pair.shown() as port:
        refused(site(command, "--ca", str(pair.ca), url=f"https://127.0.0.1:{port}"), "expired")


class Silent(BaseHTTPRequestHandler):
    """Logs nothing: its thread would write among the lines of a command of this process."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("command", ["status", "agent"])
def test_https_to_a_plain_port(site: TlsSite, command: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"https://127.0.0.1:{server.server_address[1]}"
        for ca in (str(site.pair.ca), site.pair.digest):
            refused(site(command, "--ca", ca, url=url), "does not speak TLS")
        server.shutdown()


def test_an_origin_has_the_scheme_of_the_connection(site: TlsSite) -> None:
    at = urlsplit(site.url)
    answers: list[int] = []
    for scheme in ("https", "http"):
        link = http.client.HTTPSConnection(
            str(at.hostname),
            at.port,
            context=tls.client_context(site.pair.ca.read_text()),
            timeout=LIMIT_S,
        )
        link.request("GET", "/v1/health", headers={"Origin": f"{scheme}://{at.netloc}"})
        answers.append(link.getresponse().status)
        link.close()
    assert answers == [200, 403]


def test_a_closed_port_is_no_wrong_input(site: TlsSite) -> None:
    refused(site("status", "--ca", site.pair.digest, url="https://127.0.0.1:9"), "answers", code=3)


def test_a_cluster_on_a_server_with_tls(tmp_path: Path) -> None:
    if why := redis_with_tls.why_not():
        pytest.skip(why)
    pair, state = Pair(tmp_path / "certs"), ("--state", str(tmp_path / "s"))
    with redis_with_tls.serving(pair, tmp_path) as url:
        options = ("--redis", url, "--agents", "1", "-d", *state)
        refused(
            unicron("up", *options, "--ca", str(Pair(tmp_path / "foreign").ca)),
            "its certificate is refused",
        )
        try:
            for more in (("--ca", str(pair.ca)), ()):  # the second time it has kept the authority
                started = unicron("up", *options, *more)
                assert started.returncode == 0, started.stderr
                assert "1 healthy" in unicron("status", *state).stdout
                unicron("down", *state)
        finally:
            unicron("down", *state)


# --- while it runs: the last test, it replaces the certificate ---
def test_certificates_are_read_again(site: TlsSite, foreign: Pair) -> None:
    def told(words: str) -> bool:
        return words in site.log.read_text()

    key = site.pair.key.read_bytes()
    site.pair.key.write_bytes(foreign.key.read_bytes())  # no longer a pair
    os.kill(site.process.pid, signal.SIGHUP)
    site.wait(lambda: told("the former certificate stays"))
    assert site("status", "--ca", site.pair.digest).returncode == 0
    site.pair.key.write_bytes(key)
    site.pair.renew("localhost")
    os.kill(site.process.pid, signal.SIGHUP)
    site.wait(lambda: told("the certificate was read again"))
    refused(site("status", "--ca", site.pair.digest), "not valid for '127.0.0.1'")
    there = site.url.replace("127.0.0.1", "localhost")
    assert site("status", "--ca", site.pair.digest, url=there).returncode == 0
