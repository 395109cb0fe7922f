"""Writes cli.md from the help of every command: run by `make docs`."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import typer.main
from unicron.cli.app import app, run_command

COLUMNS = "100"
HEAD = """# Commands

The help of every command, as it is printed. Written by `make docs`: change the command, not this
page. From a checkout, write `.venv/bin/unicron`.

- Data goes to stdout, messages to stderr. Every command that reads has `-o json`, and `-o yaml`
  for the same document. Control characters in names and reasons are shown as `\\x1b`; `logs` prints
  what the ranks printed, as it is.
- `TASK...` and `NODE...` take several names, and patterns in quotes: `unicron cancel 'sleep-*'`.
- `unicron --install-completion` makes the shell complete commands, and the names of tasks and nodes
  of the running cluster.
- Times are RFC 3339. `NO_COLOR` is respected.
- Exit codes: 0 done, 1 failed, 2 wrong input or usage, 3 the control plane or the log's server
  cannot be reached (`status` then shows what its files hold, also with 3), 130 interrupted. An
  error is one line, and a line `hint:` with what to type next. Ctrl-C ends these commands with 0:
  `up` once the cluster runs, `status -w`, `tail -f`, `logs -f`.
- Most commands speak HTTP to the control plane of `--state`, or of `--url` with the token in
  `$UNICRON_TOKEN`. `up`, `down` and `replay FILE` need none.
- The fields of a policy file (`up --policy`) are those of
  [Policy](records.md#policy-a-part-of-others) but `observe` and `allow_inject`, which are options.

| variable | meaning |
|---|---|
| `UNICRON_STATE` | the cluster's folder on this machine; `--state` |
| `UNICRON_SEGMENTS` | where the sealed log is, for reads when nothing answers; `log --segments` |
| `UNICRON_URL` | the control plane; `--url` |
| `UNICRON_TOKEN` | the token for `--url` or `UNICRON_URL` alone; a folder has its own |
| `UNICRON_INSECURE` | 1: talk to other hosts without encryption; `--insecure` |
| `UNICRON_CA` | the authority of its certificate, a file or `sha256:DIGEST`; `--ca` |
| `UNICRON_REDIS_URL` | your own Redis or Valkey, for `unicron up` and `unicron control-plane` |
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, "\n## unicron\n", _help()]
    for name, command in _commands(typer.main.get_command(app)):
        parts += [f"\n## unicron {name}\n", _help(name)]
        for inner, _ in _commands(command):
            parts += [f"\n### unicron {name} {inner}\n", _help(name, inner)]
    return "".join(parts)


def _commands(group: object) -> list[tuple[str, object]]:
    """The commands of a group; none of a plain command."""
    return list(getattr(group, "commands", {}).items())


def _help(*command: str) -> str:
    os.environ |= {"COLUMNS": COLUMNS, "NO_COLOR": "1"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_command([*command, "--help"])
    text = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
    return f"\n```\n{text}\n```\n"


if __name__ == "__main__":
    (Path(__file__).resolve().parent / "cli.md").write_text(render(), encoding="utf-8")
