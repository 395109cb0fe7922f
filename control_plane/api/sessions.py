"""Sessions of browsers: a token's owner asks for a one-time code, a page exchanges it for a secret.

Both are in the memory of the control plane that leads, as hashes, and end with it. A session can do
what its token can, at most as an operator, and ends when the token does. It makes no codes, so it
cannot outlive its end.
"""

import time
from collections import Counter
from collections.abc import Callable

import msgspec

from ...events.log.identity import new_secret
from .requests import Refusal
from .tokens import Role, Token, hash_of, may

CODE_S_MAX, SESSION_S_MAX = 60.0, 12 * 3600.0
OF_TOKEN_NUM_MAX, KEPT_NUM_MAX = 100, 1_000
"""Codes, and sessions, of one token and of all. Beyond, the oldest of that token ends, or of the
token that has most: no holder of a token ends the sessions of another one."""


class Sessions:
    """The codes and sessions of one control plane. Each is its token with another role and end."""

    def __init__(self, clock: Callable[[], float] = time.time, *, once: bool = True) -> None:
        """`once`: a code ends when it is used, and soon; else with the process."""
        self._clock, self._once = clock, once
        self._codes: dict[str, Token] = {}
        self._sessions: dict[str, Token] = {}

    def code(self, caller: Token, role: Role) -> tuple[str, Token]:
        """A code for a session with that role, if the caller's is not lower."""
        return self._keep(
            self._codes,
            caller,
            role if may(caller.role, role) else "view",
            CODE_S_MAX if self._once else SESSION_S_MAX,
        )

    def exchange(self, code: str) -> tuple[str, Token]:
        """The secret of a new session, and the session. Raises Refusal."""
        asked = self._codes.get(hash_of(code))
        if self._once:
            self._codes.pop(hash_of(code), None)
        if asked is None or asked.expires_s <= self._clock():
            raise Refusal(
                401, f"the code was used before, or is older than {CODE_S_MAX:g} s", "unicron open"
            )
        return self._keep(self._sessions, asked, asked.role, SESSION_S_MAX)

    def find(self, secret: str) -> Token | None:
        """The session of that secret, also if it has expired."""
        return self._sessions.get(hash_of(secret))

    def end(self, secret: str) -> None:
        """End a session; without effect if there is none."""
        self._sessions.pop(hash_of(secret), None)

    def _keep(
        self, kept: dict[str, Token], of: Token, role: Role, life_s: float
    ) -> tuple[str, Token]:
        secret = new_secret()
        kept[hash_of(secret)] = one = msgspec.structs.replace(
            of, role=role, expires_s=self._clock() + life_s
        )
        num_of = Counter(each.sha256 for each in kept.values())
        whose = of.sha256
        if len(kept) > KEPT_NUM_MAX:
            whose = num_of.most_common(1)[0][0]
        if len(kept) > KEPT_NUM_MAX or num_of[whose] > OF_TOKEN_NUM_MAX:
            del kept[next(key for key, each in kept.items() if each.sha256 == whose)]
        return secret, one
