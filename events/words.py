"""Values as words: times, lengths, sizes, counts, lists of names, commands to type."""

import math
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from .. import __version__

UNBROKEN = "\u00a0"


def rfc3339(at_s: float) -> str:
    """Seconds since 1970 as UTC with milliseconds."""
    at = datetime.fromtimestamp(at_s, UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z"


def span(length_s: float) -> str:
    """A length of time in the unit that leaves two or three digits: `203 ms`, `1.1 s`, `39 min`."""
    if length_s < 0.9995:
        ms = length_s * 1000
        return f"{ms:.1f} ms" if 0 < ms < 9.95 else f"{ms:.0f} ms"
    if length_s < 99.95:
        return f"{length_s:.1f} s" if length_s < 9.995 else f"{length_s:.0f} s"
    if length_s < 90 * 60:
        return f"{length_s / 60:.0f} min"
    return f"{length_s / 3600:.1f} h" if length_s < 48 * 3600 else f"{length_s / 86400:.1f} d"


def listed(names: Sequence[str], num_max: int = 3) -> str:
    """The first `num_max` names and the number of the others: `a, b, c and 2 more`."""
    left = len(names) - num_max
    return ", ".join(names[:num_max]) + (f" and {left} more" if left > 0 else "")


def ms(length_s: float | None) -> str:
    """Whole milliseconds below ten seconds, else seconds; `-` for None."""
    if length_s is None:
        return "-"
    return f"{length_s * 1000:.0f} ms" if length_s < 9.9995 else f"{length_s:.1f} s"


def scaled(value: float, unit: str) -> str:
    """The value with a decimal prefix: `11 MB`, `8.06 GFLOP/s`. If the unit
    begins with a space, it follows the prefix: `8 M parameters`."""
    if value == 0:
        return f"0 {unit}".rstrip()
    power = min(max(math.floor(math.log10(abs(value)) / 3), 0), 8)
    return f"{value / 1000**power:.3g} {' kMGTPEZY'[power].strip()}{unit}".rstrip()


def amount(done: int, total: int, unit: str) -> str:
    """How much is done, and of how much (0: unknown): `312 of 980 GB`, `3 of 8 parts`, `12 MB`.
    `unit`: B for bytes, or a noun in the plural."""
    if unit != "B":
        return f"{count(done)} of {count(total)} {unit}" if total else f"{count(done)} {unit}"
    if not total:
        return scaled(done, "B")
    power = min(max(math.floor(math.log10(total) / 3), 0), 8)
    return f"{done / 1000**power:.3g} of {scaled(total, 'B')}"


def count(value: int) -> str:
    return f"{value:,}"


def ranks(numbers: Iterable[int]) -> str:
    """`rank 2`, `ranks 0 1 3`, `ranks 0-7 9`; `and 4 more` after ten words."""
    sorted_ = sorted(numbers)
    words: list[str] = []
    for _, run in groupby(enumerate(sorted_), key=lambda one: one[1] - one[0]):
        found = [str(number) for _, number in run]
        words += [f"{found[0]}-{found[-1]}"] if len(found) > 2 else found
    more = f" and {len(words) - 10} more" if len(words) > 10 else ""
    what = "ranks" if len(sorted_) > 1 else "rank" if sorted_ else "no rank"
    return " ".join((what, *words[:10])) + more


def command(words: str) -> str:
    """A command line that `labelled` does not break."""
    return words.replace(" ", UNBROKEN)


def install(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation. It names a checkout or
    a wheel, since no package index has a release of Unicron."""
    root, pip = Path(__file__).resolve().parents[1], f"{sys.executable} -m pip install"
    if (root / "pyproject.toml").exists():
        return f"{pip} -e '.[{extra}]' in {root}"
    return f"{pip} '/path/to/unicron_train-{__version__}-py3-none-any.whl[{extra}]'"


def acts(do: str, option: str) -> str:
    """What to do, with `option` at each command between backquotes; `labelled` breaks none."""
    return re.sub(
        "`([^`]*)`", lambda found: command(found[1].replace(";", f"{option};") + option), do
    )


def said(why: str, do: str, option: str = "") -> str:
    """What is wrong, and what to do."""
    return f"{why}: {acts(do, option)}" if do else why


def way_to_act(healing: str, option: str) -> str:
    """The command that resumes healing in a frozen or observing cluster."""
    if healing.startswith("frozen"):
        return f"unicron unfreeze{option}"
    return f"unicron down{option}; unicron up --act{option}"


def number_of(num: int, word: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{num} {word}{'s' * (num != 1)}"


def lost_in_words(num: int | None, *, is_over: bool = False) -> str:
    """`3 iterations lost`. None means unknown; if the task `is_over`, it stays unknown."""
    if num is None:
        return f"iterations lost: unknown{'' if is_over else ' until the task prints one'}"
    return f"{number_of(num, 'iteration')} lost"


def plan_waf(plan: dict[str, Any], of: Collection[int] | None = None) -> float:
    """The WAF of all tasks under a plan (PlanChosen), including tasks that the plan leaves
    unchanged. `of`: count only these tasks, because others may have ended since."""
    kept = plan.get("kept", ())
    if of is not None and any(one["task"] not in of for one in plan["allocations"]):
        return math.fsum(one["waf"] for one in [*plan["allocations"], *kept] if one["task"] in of)
    return float(plan["waf"]) + math.fsum(
        one["waf"] for one in kept if of is None or one["task"] in of
    )


def clipped(text: str, width: int) -> str:
    """The text, at most `width` wide; a longer text is cut and ends with `...`."""
    return text if len(text) <= width else text[: width - 3] + "..."


def files_in_words(num: int) -> str:
    """How much room there is for files, as `df -i` shows it."""
    return f"room for {num} more files (df -i)"
