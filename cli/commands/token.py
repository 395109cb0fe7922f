"""`token`: create, list, rotate and revoke the tokens of a running cluster."""

import getpass
import secrets
import shlex
from urllib.parse import quote

from ...events import network_address, tls
from ...events.errors import UsageError
from ..cluster.client import Client, Urls, connect
from ..cluster.state_dir import StateDir
from ..terminal import console
from ..terminal.format import Plain, rfc3339, table
from ..terminal.times import length_s
from .operate import reason_or_user

JOIN_LIFE = "24h"
"""How long a join token is valid, unless another time is given."""


def create(
    state: StateDir,
    url: Urls,
    role: str | None,
    expires: str,
    name: str,
    *,
    join: bool,
    node: str,
    uses: int,
    reason: str,
    as_json: bool,
) -> None:
    """Print a new secret on stdout, or a command with it: it cannot be shown again."""
    if join == bool(role):
        raise UsageError("give either --role or --join", "unicron token create --join")
    if not join and (node or uses > 1):
        raise UsageError("--node and --uses are for --join", "leave them out")
    name = name or (f"join-{node or secrets.token_hex(4)}" if join else _login_name())
    body = {
        "name": name,
        "role": role or "join",
        "node": node,
        "uses": uses if join else 0,
        "reason": reason_or_user(reason),
        "life_s": life(expires or (JOIN_LIFE if join else "")),
    }
    client = connect(state, url)
    _show_secret(client, client.post("/v1/tokens", body), as_json=as_json)


def rotate(state: StateDir, url: Urls, name: str, reason: str, *, as_json: bool) -> None:
    """Print the new secret of the name; the old one ends now."""
    client = connect(state, url)
    _show_secret(
        client,
        client.post(
            f"/v1/tokens/{quote(name, safe='')}/rotate", {"reason": reason_or_user(reason)}
        ),
        as_json=as_json,
    )


def revoke(state: StateDir, url: Urls, name: str, reason: str, *, as_json: bool) -> None:
    """End a token now."""
    answer = connect(state, url).post(
        f"/v1/tokens/{quote(name, safe='')}/revoke", {"reason": reason_or_user(reason)}
    )
    console.show(answer, [f"{name}  is refused from now on"], as_json=as_json)


def show(state: StateDir, url: Urls, *, as_json: bool) -> None:
    """List the tokens, without their secrets."""
    answer = {
        "tokens": sorted(connect(state, url).items("tokens"), key=lambda one: one["created_s"] > 0)
    }  # the owner's first
    rows = [
        (
            one["name"],
            one["role"],
            rfc3339(one["created_s"]) if one["created_s"] else "-",
            _end(one),
            f"{one['used']} of {one['uses']}" if one["uses"] else "-",
        )
        for one in answer["tokens"]
    ]
    console.show(
        answer, table(("NAME", "ROLE", "CREATED", "EXPIRES", "NODES"), rows), as_json=as_json
    )


def life(expires: str) -> float:
    """The seconds of `30d`, `12h` or `90m`; 0 for "". Raises UsageError."""
    if not expires:
        return 0.0
    found = length_s(expires)
    if found is None:
        raise UsageError(
            f"--expires {expires!r} is not a length of time", "for example 30d, 12h or 90m"
        )
    return found


def _end(token: Plain) -> str:
    if not token["expires_s"]:
        return "never"
    return f"{rfc3339(token['expires_s'])}{', has expired' if token['expired'] else ''}"


def join_command(client: Client, secret: str, node: str, cluster: Plain) -> str:
    """The command that starts an agent on another host. Its secret is not among its arguments,
    which all users of that host can see. `cluster`: of the view of the state."""
    asked = (client.leader or client).url
    urls = dict.fromkeys((asked, cluster["follows"] or asked, *cluster["followers"]))
    words = [
        "unicron",
        "agent",
        *(word for url in urls for word in ("--url", url)),
        *(["--ca", cluster["ca"]] if cluster["ca"] else []),
    ]
    if any(map(tls.is_plain, urls)):
        words.append("--insecure")
    return f"UNICRON_TOKEN={secret} {shlex.join(words + (['--node', node] if node else []))}"


def _show_secret(client: Client, answer: Plain, *, as_json: bool) -> None:
    is_join = answer["role"] == "join"
    if is_join:
        answer["command"] = join_command(
            client, answer["token"], answer["node"], client.get("/v1/state")["cluster"]
        )
    if as_json:
        console.data(answer)
        return
    console.out(answer["command" if is_join else "token"])
    end = f"until {rfc3339(answer['expires_s'])}" if answer["expires_s"] else "until it is revoked"
    use = (
        f"for {answer['uses']} host{'s' * (answer['uses'] > 1)}"
        if is_join
        else "whoever uses it sets UNICRON_TOKEN"
    )
    console.talk(f"{answer['name']}, role {answer['role']}, {end}; {use}; it is not shown again")
    if is_join and network_address.is_loopback(client.host):
        console.talk("only this machine reaches that address: see unicron control-plane --listen")


def _login_name() -> str:
    """The user's login name. Raises UsageError if there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        raise UsageError("this user has no name for the token", "give --name WHO") from None
