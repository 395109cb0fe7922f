"""Tokens of the HTTP API: who may do what. The control plane keeps only their hashes.

They are in a file of the state folder and, for the next leader, on the log's server; never in the
log. The identity of a node is a token as well, named as the node.
"""

import hashlib
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ...events.decoding import from_json
from ...events.errors import UsageError
from ...events.log.identity import SECRET, new_secret
from ...events.log.redis_streams import RedisLog
from ...events.private_files import read_private, write_private
from ...events.records.types import OWNER
from ...events.spec import job

Role = Literal["view", "operate", "admin", "join", "node"]
ROLES: tuple[Role, ...] = ("view", "operate", "admin")
"""Each role may do all that the roles before it may. The others may only join."""
TOKENS_NUM_MAX = 10_000
LIFE_S_MAX = 10 * 365 * 86_400.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}\Z")


class Token(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a token. `expires_s` 0: never. One with the role `join` enrols `uses` nodes,
    or only `node`; it has enrolled `used` of them."""

    name: str
    role: Role
    sha256: str
    created_s: float
    expires_s: float = 0.0
    node: str = ""
    uses: int = 0
    used: int = 0

    @property
    def is_used_up(self) -> bool:
        return self.role == "join" and self.used >= self.uses


class _File(Struct, frozen=True, kw_only=True):
    version: int = 0
    """Grows with each change."""
    tokens: tuple[Token, ...] = ()
    revoked: dict[str, str] = {}
    """Hash -> node of the identities that were revoked."""


def may(role: Role, needed: Role) -> bool:
    """Whether a token of that role may make a call that needs the other one."""
    if needed == "join":
        return role in ("join", "node", "admin")
    return role in ROLES and ROLES.index(role) >= ROLES.index(needed)


class Tokens:
    """The tokens of one control plane; only the leader writes the file. Raises UsageError if the
    file is not one of tokens, or if others may read it, and OSError if it cannot be read."""

    def __init__(self, path: Path, *, owner: str, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._owner = Token(name=OWNER, role="admin", sha256=hash_of(owner), created_s=0.0)
        try:
            found = from_json(read_private(path), _File)
        except FileNotFoundError:
            found = _File()
        except msgspec.MsgspecError as error:
            raise UsageError(
                f"{path} is not a file of tokens: {error}",
                "restore it, or remove it and create the tokens again",
            ) from None
        self._take(found)

    def _take(self, file: _File) -> None:
        self._version, self._revoked = file.version, file.revoked
        self._by_hash = {one.sha256: one for one in (*file.tokens, self._owner)}

    def encoded(self) -> bytes:
        """The content of the file."""
        file = _File(
            version=self._version,
            revoked=self._revoked,
            tokens=tuple(one for one in self._by_hash.values() if one is not self._owner),
        )
        return msgspec.json.format(msgspec.json.encode(file))

    def merge(self, shared: bytes, *, writes: bool) -> bool:
        """Take what another control plane has shared, and with `writes` store it in the file. False
        if these tokens are newer, or if nothing was shared."""
        if not shared or (found := from_json(shared, _File)).version < self._version:
            return False
        self._take(found)
        if writes and self._version:
            with suppress(OSError):  # the server has them too
                write_private(self._path, self.encoded())
        return True

    def find(self, secret: str) -> Token | None:
        """The token of that secret, also if it has expired; None if there is none."""
        # A table of hashes: how long the search takes tells nothing about a secret.
        return self._by_hash.get(hash_of(secret))

    def revoked_node(self, secret: str) -> str:
        """The node whose identity this was until it was revoked; "": of none."""
        return self._revoked.get(hash_of(secret), "")

    def revoked_nodes(self) -> set[str]:
        """The nodes whose identity was revoked, and that have no other one since."""
        return set(self._revoked.values()) - self.enrolled_nodes()

    def enrolled_nodes(self) -> set[str]:
        """The nodes that have an identity."""
        return {one.name for one in self._by_hash.values() if one.role == "node"}

    def has(self, token: Token) -> bool:
        """Whether its secret is still valid: it was not revoked or rotated, and has not expired."""
        held = self._by_hash.get(token.sha256)
        return held is not None and not self.has_expired(held)

    def has_expired(self, token: Token) -> bool:
        return 0.0 < token.expires_s <= self._clock()

    def all(self) -> list[Token]:
        return list(self._by_hash.values())

    def create(
        self, name: str, role: Role, life_s: float, *, node: str = "", uses: int = 0
    ) -> tuple[Token, str]:
        """A new token and its secret, which is kept nowhere. `life_s` 0: it never expires. `node`
        and `uses` are of a join token (0 uses: 1). Raises UsageError."""
        if role != "join" and (node or uses):
            raise UsageError("node and uses are of a token with the role join", "leave them out")
        if node and (uses > 1 or not job.NAME.match(node)):
            raise UsageError(
                f"node: {node[:64]!r} with {uses or 1} uses is not one node's name",
                "--node NAME for one node, or --uses N for any",
            )
        if not 0 <= uses <= TOKENS_NUM_MAX:
            raise UsageError(f"uses: {uses} is not from 1 to {TOKENS_NUM_MAX}", "--uses N")
        if not NAME.match(name) or name == OWNER:
            raise UsageError(
                f"name: {name[:64]!r} is not a name for a token",
                f"letters, digits and . _ @ -, at most 63, not {OWNER!r}",
            )
        if not 0.0 <= life_s <= LIFE_S_MAX:
            raise UsageError(f"expires: {life_s:g} s is not a life of a token", "at most 10 years")
        if any(one.name == name and not one.is_used_up for one in self._by_hash.values()):
            raise UsageError(
                f"there is a token named {name}",
                f"unicron token rotate {name}, or give another --name",
            )
        self._check_room()
        return self._add(
            Token(
                name=name,
                role=role,
                sha256="",
                created_s=0.0,
                node=node,
                uses=(uses or 1) if role == "join" else 0,
            ),
            life_s,
        )

    def enrol(self, caller: Token, node: str, secret: str, *, is_live: bool) -> Token:
        """Give a node the identity that its agent has made; it may be asked for again. `is_live`:
        an agent of that name may be at work. Raises UsageError."""
        if not SECRET.match(secret):
            raise UsageError("identity: not a secret that an agent makes", "")
        mine = self._by_hash.get(hash_of(secret))
        if mine is not None and (mine.role, mine.name) == ("node", node):
            return mine
        held = self._by_hash.get(caller.sha256)  # as it is now: it may have enrolled meanwhile
        if held is None:
            raise UsageError(f"the token {caller.name} was revoked", "use another one")
        if caller.node not in ("", node):
            raise UsageError(
                f"the token {caller.name} enrols {caller.node} only",
                f"--node {caller.node}, or another token",
            )
        if held.is_used_up:
            raise UsageError(
                f"the token {caller.name} is used up",
                f"an admin: unicron token rotate {caller.name}",
            )
        if any(one.name == node for one in self._by_hash.values()) or (
            is_live and node not in self.revoked_nodes()
        ):
            raise UsageError(
                f"the name {node} is taken",
                "give this node another --node; if the "
                f"other one is gone: unicron token revoke {node}, then unicron token "
                f"create --join --node {node}",
            )
        if mine is not None or self.revoked_node(secret):
            raise UsageError("identity: it was in use before", "")
        self._check_room()
        new = Token(name=node, role="node", sha256=hash_of(secret), created_s=self._clock())
        if held.role == "join":
            held = msgspec.structs.replace(held, used=held.used + 1)
        self._keep({**self._by_hash, held.sha256: held, new.sha256: new})
        return new

    def rotate(self, name: str) -> tuple[Token, str]:
        """A new secret, for as long a life; the old one ends now. Raises UsageError."""
        old = self._named(name)
        if old.role == "node":
            raise UsageError(
                f"{name} is a node: its agent alone has its secret",
                f"unicron token revoke {name}, then unicron token create --join --node {name}",
            )
        return self._add(old, old.expires_s - old.created_s if old.expires_s else 0.0)

    def revoke(self, name: str) -> Token:
        """The token ends now; returns it. Raises UsageError."""
        old = self._named(name)
        revoked = {**self._revoked, old.sha256: name} if old.role == "node" else self._revoked
        self._keep(
            {key: one for key, one in self._by_hash.items() if one is not old},
            dict(list(revoked.items())[-TOKENS_NUM_MAX:]),
        )
        return old

    def _add(self, old: Token, life_s: float) -> tuple[Token, str]:
        """A token as `old`, in place of the one with its name, with a new secret."""
        secret, now_s = new_secret(), self._clock()
        token = msgspec.structs.replace(
            old,
            sha256=hash_of(secret),
            created_s=now_s,
            used=0,
            expires_s=now_s + life_s if life_s else 0.0,
        )
        kept = {key: one for key, one in self._by_hash.items() if one.name != old.name}
        self._keep({**kept, token.sha256: token})
        return token, secret

    def _check_room(self) -> None:
        if len(self._by_hash) >= TOKENS_NUM_MAX:
            raise UsageError(f"there are {TOKENS_NUM_MAX} tokens", "unicron token revoke NAME")

    def _keep(self, by_hash: dict[str, Token], revoked: dict[str, str] | None = None) -> None:
        """Write the file first: what it does not hold is not answered."""
        before = self._by_hash, self._revoked
        self._by_hash, self._revoked = by_hash, self._revoked if revoked is None else revoked
        self._version += 1
        try:
            write_private(self._path, self.encoded())
        except OSError as error:
            self._by_hash, self._revoked = before
            self._version -= 1
            raise UsageError(
                f"{self._path}: {error.strerror}", "the state folder cannot be written to"
            ) from None

    def _named(self, name: str) -> Token:
        if name == OWNER:
            raise UsageError(
                "the state folder's own token stays while the control plane runs",
                "stop it, remove the folder's file `token`, and start it again",
            )
        found = next((one for one in self._by_hash.values() if one.name == name), None)
        if found is None:
            raise UsageError(f"there is no token {name[:64]!r}", "unicron token list")
        return found


async def share(tokens: Tokens, log: RedisLog, epoch: int) -> set[str]:
    """Take the tokens that former leaders have shared, or in an epoch of one's own share newer
    ones; returns the nodes whose identity was revoked. Raises LogError."""
    if not tokens.merge(await log.tokens(), writes=epoch > 0) and epoch:
        await log.keep_tokens(tokens.encoded(), epoch=epoch)
    return tokens.revoked_nodes()


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
