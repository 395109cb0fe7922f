"""Finds Megatron-LM's progress lines in the output of a command. Pure.

 [2025-08-01 09:31:44] iteration        1/    5000 | consumed samples:          128 | elapsed time
 per iteration (ms): 33186.0 | ... | global batch size:   128 | lm loss: 1.045013E+01 | ... |

A line needs `iteration N/M |` and `elapsed time per iteration (ms)` or `(s)`. Optional: the global
batch, the loss, and the numbers of skipped and NaN iterations since the previous line. A line may
have a prefix (torchrun's `[default7]:`), and may be of Megatron-DeepSpeed, GPT-NeoX or Primus.
Primus prints two times, `16601.3/17219.3`: the mean of this interval and of the whole run.
"""

import math
import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

LINE_BYTES_MAX = 16 << 10
"""A longer line is not one of Megatron's."""
STEP_S_MAX = 1e6
_WAITING_NUM_MAX = 8
"""Lines that wait to be reported, because they cannot be merged."""
_MARK = b"elapsed time per iteration ("
_PAUSE_MARKS = (b" checkpoint ", b"valuating ", b"validation")
"""Parts of the lines that Megatron-LM and GPT-NeoX print about a checkpoint (`saving checkpoint
at`, `successfully saved checkpoint from`, `scheduled an async checkpoint save`) or an evaluation
(`Evaluating on 64 samples`, `validation loss at`, `validation results at`)."""
_NUMBER = rb"[0-9]{1,15}(?:\.[0-9]{0,15})?(?:[eE][+-]?[0-9]{1,3})?"
_ITERATION = re.compile(rb"(?<![A-Za-z])iteration[ \t]+([0-9]{1,12})/[ \t]*([0-9]{1,12})[ \t]*\|")
_STEP = re.compile(
    rb"elapsed time per iteration \((ms|s)\):[ \t]*(%s)(?:/%s)?[ \t]*(?:\||$)" % (_NUMBER, _NUMBER)
)
_LOSS = re.compile(
    rb"\|[ \t]*(?:(?:lm|total)[ _])?loss:[ \t]*([+-]?(?:%s|(?i:nan|inf)))[ \t]*(?:\||$)" % _NUMBER
)
_COUNTS = tuple(
    re.compile(rb"\|[ \t]*%s:[ \t]*([0-9]{1,12})[ \t]*(?:\||$)" % name)
    for name in (
        rb"global batch size",
        rb"number of skipped iterations",
        rb"number of nan iterations",
    )
)


class ProgressLine(NamedTuple):
    """The content of one progress line, or of several that `IterationRanges` has merged."""

    iteration: int
    """Finished iterations, counted from 1."""
    iterations: int
    """Iterations of the whole run; 0: the line has an impossible number."""
    step_s: float
    """Mean step time of the iterations since the previous line."""
    loss: float | None
    """None: none was printed, or it is not finite."""
    global_batch: int
    """In samples; 0: not printed."""
    skipped: int
    nan: int
    num: int = 0
    """Iterations that `step_s` averages; 0: unknown, or the process was warming up."""
    loss_text: str = ""
    """The loss, if it is not finite."""


def parse(line: bytes) -> ProgressLine | None:
    """Parse a line; None if it is not a progress line. Never raises."""
    at, took = _ITERATION.search(line), _STEP.search(line)
    if at is None or took is None:
        return None
    iteration, iterations = int(at[1]), int(at[2])
    step_s = float(took[2]) / (1000.0 if took[1] == b"ms" else 1.0)
    if iteration < 1 or not step_s <= STEP_S_MAX:
        return None
    lost = _LOSS.search(line)
    loss = float(lost[1]) if lost is not None else None
    batch, skipped, nan = (
        int(count[1]) if (count := name.search(line)) is not None else 0 for name in _COUNTS
    )
    return ProgressLine(
        iteration,
        iterations if iterations >= iteration else 0,
        step_s,
        loss if loss is not None and math.isfinite(loss) else None,
        batch,
        skipped,
        nan,
        loss_text="" if loss is None or math.isfinite(loss) else repr(loss),
    )


class ProgressLines:
    """Splits output into progress lines; the result does not depend on how the output is cut."""

    def __init__(self) -> None:
        self._begun = b""
        self._dropping = False
        """The current line is too long, or its beginning was missed."""
        self.is_pause_announced = False
        """A checkpoint or an evaluation was printed since the last progress line."""

    def feed(self, data: bytes) -> list[ProgressLine]:
        """Return the progress lines that end in `data`. A carriage return ends a line too."""
        data = data.replace(b"\r", b"\n")
        end = data.rfind(b"\n")
        if end < 0:
            self._hold(data)
            return []
        whole = self._begun + data[:end]
        if self._dropping:
            whole = data[data.find(b"\n") : end]
        self._begun, self._dropping = b"", False
        self._hold(data[end + 1 :])
        begin = whole.rfind(_MARK)
        self.is_pause_announced = (self.is_pause_announced and begin < 0) or any(
            whole.find(mark, begin + 1) >= 0 for mark in _PAUSE_MARKS
        )
        return list(_found(whole))

    @property
    def num_begun(self) -> int:
        """The bytes of the current line."""
        return len(self._begun)

    def skip(self) -> None:
        """Mark a gap in the output: drop the current line and the rest of the next one."""
        self._begun, self._dropping = b"", True

    def _hold(self, data: bytes) -> None:
        if self._dropping or len(self._begun) + len(data) > LINE_BYTES_MAX:
            self._begun, self._dropping = b"", True
        else:
            self._begun += data


def _found(data: bytes) -> Iterator[ProgressLine]:
    at = 0
    while (mark := data.find(_MARK, at)) >= 0:
        begin = max(data.rfind(b"\n", at, mark) + 1, at)
        at = data.find(b"\n", mark)
        at = at if at >= 0 else len(data)
        line = parse(data[begin:at]) if at - begin <= LINE_BYTES_MAX else None
        if line is not None:
            yield line


class IterationRanges:
    """Merges the progress lines of one process if they are adjacent and have one global batch.

    Newer Megatron prints the very first iteration without restarting its timer, so the next line
    averages that too: its number is no multiple of the distance (1, then 10: 10 iterations, not 9).
    """

    def __init__(self) -> None:
        self._last = 0
        """The latest iteration; 0: none."""
        self._is_first = False
        """The latest line was the first of a process."""
        self._waiting: deque[ProgressLine] = deque(maxlen=_WAITING_NUM_MAX)

    def add(self, line: ProgressLine) -> None:
        """Add the next line. A lower iteration counts as the first line of a process. A repeated
        line (from several ranks under one launcher) is ignored."""
        if line.iteration == self._last:
            return
        follows = 0 < self._last < line.iteration
        num = line.iteration - self._last if follows else 0
        if self._is_first and follows and line.iteration % num:
            num = 0
        self._last, self._is_first = line.iteration, not follows
        one = line._replace(num=num)
        before = self._waiting[-1] if self._waiting else None
        if before is not None and num and before.num and before.global_batch == one.global_batch:
            total = before.num + num
            self._waiting[-1] = one._replace(
                num=total,
                step_s=(before.num * before.step_s + num * one.step_s) / total,
                skipped=before.skipped + one.skipped,
                nan=before.nan + one.nan,
            )
        else:
            self._waiting.append(one)

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def take(self) -> ProgressLine | None:
        """Remove and return the oldest lines that were merged; None if there are none."""
        return self._waiting.popleft() if self._waiting else None
