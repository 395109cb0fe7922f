"""`token`: create, list, rotate and revoke the tokens of a running cluster."""

from __future__ import annotations

import getpass
import json
import re
from urllib.parse import quote

from ...events.errors import UsageError
from ..cluster.client import connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, rfc3339, table

UNITS_S = {"m": 60.0, "h": 3_600.0, "d": 86_400.0}


def create(state: StateDir, url: str | None, role: str, expires: str, name: str, *,
           as_json: bool) -> None:
    """Print a new secret on stdout: it cannot be shown again."""
    life_s = life(expires)
    body = {"name": name or _login_name(), "role": role, "life_s": life_s}
    _show_secret(connect(state, url).post("/v1/tokens", body), as_json=as_json)


def rotate(state: StateDir, url: str | None, name: str, *, as_json: bool) -> None:
    """Print the new secret of the name; the old one ends now."""
    _show_secret(connect(state, url).post(f"/v1/tokens/{quote(name, safe='')}/rotate", {}),
                 as_json=as_json)


def revoke(state: StateDir, url: str | None, name: str, *, as_json: bool) -> None:
    """End a token now."""
    answer = connect(state, url).post(f"/v1/tokens/{quote(name, safe='')}/revoke", {})
    console.show(answer, [f"{name}  is refused from now on"], as_json=as_json)


def show(state: StateDir, url: str | None, *, as_json: bool) -> None:
    """List the tokens, without their secrets."""
    answer: Plain = connect(state, url).get("/v1/tokens")
    rows = [(one["name"], one["role"], rfc3339(one["created_s"]) if one["created_s"] else "-",
             _end(one)) for one in answer["tokens"]]
    console.show(answer, table(("NAME", "ROLE", "CREATED", "EXPIRES"), rows), as_json=as_json)


def life(expires: str) -> float:
    """The seconds of `30d`, `12h` or `90m`; 0 for "". Raises UsageError."""
    if not expires:
        return 0.0
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", expires)
    if found is None:
        raise UsageError(f"--expires {expires!r} is not a length of time",
                         "for example 30d, 12h or 90m")
    return int(found[1]) * UNITS_S[found[2]]


def _end(token: Plain) -> str:
    if not token["expires_s"]:
        return "never"
    return f"{rfc3339(token['expires_s'])}{', has expired' if token['expired'] else ''}"


def _show_secret(answer: Plain, *, as_json: bool) -> None:
    if as_json:
        console.out(json.dumps(answer))
        return
    console.out(answer["token"])
    end = f"until {rfc3339(answer['expires_s'])}" if answer["expires_s"] else "until it is revoked"
    console.talk(f"{answer['name']}, role {answer['role']}, {end}; it is not shown again: "
                 "UNICRON_TOKEN=... for whoever uses it")


def _login_name() -> str:
    """The user's login name. Raises UsageError if there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise UsageError("this user has no name for the token", "give --name WHO") from None
