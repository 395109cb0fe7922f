"""Tokens of the HTTP API: who may do what. The control plane keeps only their hashes.

They are in a file of the state folder and never in the log: a replay needs none of them.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from ...events.errors import UsageError
from ...events.private_files import read_private, write_private
from ...events.records.types import OWNER

Role = Literal["view", "operate", "admin"]
ROLES: tuple[Role, ...] = ("view", "operate", "admin")
"""Each role may do all that the roles before it may."""
PREFIX = "unicron_"
SECRET_BYTES_NUM = 32
TOKENS_NUM_MAX = 1_000
LIFE_S_MAX = 10 * 365 * 86_400.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}\Z")


class Token(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of a token. Times are seconds since 1970; `expires_s` 0: never."""

    name: str
    role: Role
    sha256: str
    created_s: float
    expires_s: float = 0.0


class _File(Struct, frozen=True, kw_only=True):
    tokens: tuple[Token, ...] = ()


def new_secret() -> str:
    """A secret of 256 random bits. The prefix lets scanners of leaked secrets find it."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES_NUM)


class Tokens:
    """The tokens of one control plane, which is the only writer of their file.

    Raises UsageError if the file is not one of tokens, or if others may read it.
    """

    def __init__(self, path: Path, *, owner: str, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._owner = Token(name=OWNER, role="admin", sha256=_hash(owner), created_s=0.0)
        self._by_hash: dict[str, Token] = {}
        try:
            found = msgspec.json.decode(read_private(path), type=_File)
        except FileNotFoundError:
            found = _File()
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}",
                             "use a folder of yours: --state") from None
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path} is not a file of tokens: {error}",
                             "restore it, or remove it and create the tokens again") from None
        self._by_hash = {one.sha256: one for one in (*found.tokens, self._owner)}

    def find(self, secret: str) -> Token | None:
        """The token of that secret, also if it has expired; None if there is none."""
        # A table of hashes: how long the search takes tells nothing about a secret.
        return self._by_hash.get(_hash(secret))

    def is_valid(self, token: Token) -> bool:
        """Whether the token is neither revoked, rotated nor expired."""
        return self._by_hash.get(token.sha256) == token and not self.has_expired(token)

    def has_expired(self, token: Token) -> bool:
        return 0.0 < token.expires_s <= self._clock()

    def all(self) -> list[Token]:
        """All tokens, by name; the owner's first."""
        return sorted(self._by_hash.values(), key=lambda one: (one.name != OWNER, one.name))

    def create(self, name: str, role: Role, life_s: float) -> tuple[Token, str]:
        """A new token and its secret, which is nowhere else. `life_s` 0: it never expires.

        Raises UsageError.
        """
        if not NAME.match(name) or name == OWNER:
            raise UsageError(f"name: {name[:64]!r} is not a name for a token",
                             f"letters, digits and . _ @ -, at most 63, not {OWNER!r}")
        if not 0.0 <= life_s <= LIFE_S_MAX:
            raise UsageError(f"expires: {life_s:g} s is not a life of a token", "at most 10 years")
        if any(one.name == name for one in self._by_hash.values()):
            raise UsageError(f"there is a token named {name}",
                             f"unicron token rotate {name}, or give another --name")
        if len(self._by_hash) >= TOKENS_NUM_MAX:
            raise UsageError(f"there are {TOKENS_NUM_MAX} tokens", "unicron token revoke NAME")
        return self._add(name, role, life_s)

    def rotate(self, name: str) -> tuple[Token, str]:
        """A new secret for the name, with its role and as long a life. The old one ends now.

        Raises UsageError.
        """
        old = self._named(name)
        life_s = old.expires_s - old.created_s if old.expires_s else 0.0
        return self._add(name, old.role, life_s, instead_of=old)

    def revoke(self, name: str) -> None:
        """The token ends now. Raises UsageError."""
        old = self._named(name)
        self._keep({key: one for key, one in self._by_hash.items() if one is not old})

    def _add(self, name: str, role: Role, life_s: float, instead_of: Token | None = None
             ) -> tuple[Token, str]:
        secret, now_s = new_secret(), self._clock()
        token = Token(name=name, role=role, sha256=_hash(secret), created_s=now_s,
                      expires_s=now_s + life_s if life_s else 0.0)
        kept = {key: one for key, one in self._by_hash.items() if one is not instead_of}
        self._keep({**kept, token.sha256: token})
        return token, secret

    def _keep(self, by_hash: dict[str, Token]) -> None:
        """Write the file first: what it does not hold is not answered."""
        file = _File(tokens=tuple(one for one in by_hash.values() if one is not self._owner))
        try:
            write_private(self._path, msgspec.json.format(msgspec.json.encode(file)))
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}",
                             "the state folder cannot be written to") from None
        self._by_hash = by_hash

    def _named(self, name: str) -> Token:
        if name == OWNER:
            raise UsageError("the state folder's own token stays while the control plane runs",
                             "stop it, remove the folder's file `token`, and start it again")
        found = next((one for one in self._by_hash.values() if one.name == name), None)
        if found is None:
            raise UsageError(f"there is no token {name[:64]!r}", "unicron token list")
        return found


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
