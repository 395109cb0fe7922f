"""Messages to a webhook: what begins to need a person, and what no longer does.

One message has all that is new. After a message at least PAUSE_S pass, more after failures, so that
there is never a storm. What was told is in the log (PersonNotified), so that the next leader does
not tell it again; only what a leader sent just before its end may come twice.
"""

import asyncio
import secrets
from collections.abc import Iterable
from typing import Any

import aiohttp
import msgspec
import structlog
from msgspec import Struct

from ...events.errors import LogError, UsageError
from ...events.network_address import url_parts
from ...events.records.reports import PersonNotified
from ...events.words import rfc3339
from ..service.coordinator import Coordinator
from .metrics import Metrics, look
from .needs import Need
from .needs import needs as needs_of

SLACK = "slack+"
"""Before a URL: the message is Slack's, `{"text": ...}`."""
SHOWN_NUM_MAX = 10
COST_TIMES = 50
"""A pause is so many times as long as a look takes."""
LINE_CHARS_MAX = 300


class Limits(Struct, frozen=True, kw_only=True):
    """Times of the messages."""

    look_s: float = 5.0
    """Interval of the looks. What two of them find is told."""
    gone_s_min: float = 60.0
    """What is gone for so long is told to be over; if it comes back before, nothing is told."""
    pause_s: float = 30.0
    """Shortest time between two messages; doubled with each failure in a row."""
    pause_s_max: float = 900.0
    post_s_max: float = 10.0


def check_url(text: str) -> str:
    """The URL of a webhook, from a file that has it alone. Raises UsageError, without the URL."""
    url = text.strip()
    parts = url_parts(url.removeprefix(SLACK))
    if parts.scheme not in ("http", "https") or not parts.hostname or len(url.split()) != 1:
        raise UsageError(
            "the file of --notify has no URL of a webhook",
            "https://HOST/PATH, or slack+https://HOST/PATH, and nothing else",
        )
    return url


class Notifier:
    """Sends them while this control plane leads."""

    def __init__(
        self,
        coordinator: Coordinator,
        url: str,
        cluster: str,
        metrics: Metrics,
        limits: Limits | None = None,
    ) -> None:
        self._coordinator, self._cluster, self._metrics = coordinator, cluster, metrics
        self._url, self._is_slack = url.removeprefix(SLACK), url.startswith(SLACK)
        self._limits = limits or Limits()
        self._before = set[str]()
        """What the last look found."""
        self._gone_s: dict[str, float] = {}
        """Since when that is gone which was told."""
        self._num_failed = 0
        self._logger = structlog.get_logger("notifications")

    async def run(self) -> None:
        """Look and send until it is cancelled."""
        pause_s = self._limits.look_s
        limit = aiohttp.ClientTimeout(total=self._limits.post_s_max)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while True:
                await asyncio.sleep(pause_s)
                try:
                    pause_s = await self._look(session)
                except LogError:  # what was sent may be sent again
                    pause_s = self._limits.pause_s

    async def _look(self, session: aiohttp.ClientSession) -> float:
        """Send what is new; returns the pause until the next look. Raises LogError."""
        if not self._coordinator.leading:
            self._before.clear()
            self._gone_s.clear()
            return self._limits.look_s
        now_s, shown = await look(self._coordinator)
        look_s = max(self._limits.look_s, COST_TIMES * (self._coordinator.now_s - now_s))
        state = await self._coordinator.settled()
        names = {task["id"]: task["name"] for task in shown["tasks"]}
        found = {_key(one, names): one for one in needs_of(shown, now_s)}
        opened = [key for key in found if key in self._before and key not in state.notified]
        self._before = set(found)
        self._gone_s = {
            key: self._gone_s.get(key, now_s) for key in state.notified if key not in found
        }
        over = [
            key
            for key, since_s in self._gone_s.items()
            if now_s - since_s >= self._limits.gone_s_min
        ]
        if not opened and not over:
            return look_s
        why = await self._post(session, self._message(now_s, [found[key] for key in opened], over))
        self._metrics.notifications.labels("failed" if why else "sent").inc()
        self._num_failed = self._num_failed + 1 if why else 0
        pause_s = min(self._limits.pause_s * 2.0**self._num_failed, self._limits.pause_s_max)
        if why:
            self._logger.warning("the webhook takes no message", why=why, again_s=pause_s)
        else:
            await self._coordinator.write(
                secrets.token_hex(16), PersonNotified(opened=tuple(opened), over=tuple(over))
            )
        return pause_s

    def _message(self, now_s: float, opened: list[Need], over: list[str]) -> dict[str, Any]:
        lines = [
            *(
                f"NEEDS YOU  {one.why}{': ' * bool(one.do)}{one.do}"
                for one in opened[:SHOWN_NUM_MAX]
            ),
            *(f"NO LONGER  {key}" for key in over[:SHOWN_NUM_MAX]),
        ]
        if num := max(len(opened) - SHOWN_NUM_MAX, 0) + max(len(over) - SHOWN_NUM_MAX, 0):
            lines.append(f"and {num} more: unicron status")
        text = "\n".join(_line(one) for one in (f"Unicron, cluster {self._cluster}:", *lines))
        if self._is_slack:
            return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}
        return {
            "cluster": self._cluster,
            "at": rfc3339(now_s),
            "text": text,
            "opened": msgspec.to_builtins(opened[:SHOWN_NUM_MAX]),
            "over": over[:SHOWN_NUM_MAX],
            "num_more": num,
        }

    async def _post(self, session: aiohttp.ClientSession, message: dict[str, Any]) -> str:
        """Why it was not taken; "": it was. No redirect is followed. The URL is a secret."""
        try:
            async with session.post(self._url, json=message, allow_redirects=False) as answer:
                return "" if 200 <= answer.status < 300 else f"it answers {answer.status}"
        except TimeoutError:
            return f"no answer within {self._limits.post_s_max:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return type(error).__name__


def _key(one: Need, names: dict[int, str]) -> str:
    """What it is of: the same for as long as it lasts."""
    task = f"{names.get(one.task, '?')} ({one.task})" if one.task else ""
    of: Iterable[str] = (
        (f"inc-{one.incident}",) if one.what == "incident" else filter(None, (one.node, task))
    )
    return " ".join((one.what, *of))


def _line(text: str) -> str:
    """One line without control characters."""
    line = "".join(letter for letter in " ".join(text.split()) if letter.isprintable())
    return line if len(line) <= LINE_CHARS_MAX else line[: LINE_CHARS_MAX - 3] + "..."
