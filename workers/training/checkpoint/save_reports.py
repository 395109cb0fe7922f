"""Reports of saves that fail: the first one, a change of the reason, and that they work again."""

from collections.abc import Callable

from ....events.records.orders import StartRank
from ....events.records.reports import CheckpointFailed
from ....events.records.types import Body, SaveKind
from .checkpoint import NotSaved

WHY_CHARS_MAX = 500
"""Characters that are reported of the reason."""


class SaveReports:
    """The reports of one rank about one kind of save. `is_unknown`: an earlier process of the rank
    may have reported a failure, and nobody else says that it is over."""

    def __init__(
        self,
        start: StartRank,
        what: SaveKind,
        tell: Callable[[Body], None],
        *,
        is_unknown: bool = False,
    ) -> None:
        self._start, self._tell = start, tell
        self._what: SaveKind = what
        self._failing: tuple[int, str, bool] | None = (0, "unknown", False) if is_unknown else None
        """Of the last save, if it failed: the generation, the reason, and whether it was final."""

    def failed(
        self,
        error: NotSaved,
        generation: int,
        step_version: int,
        *,
        final: bool = False,
        is_repeated: bool = False,
    ) -> bool:
        """Report a failure that is new in this generation, or `is_repeated`. Returns whether it is
        new."""
        failing = generation, error.why, final
        is_new, self._failing = failing != self._failing, failing
        if is_new or is_repeated:
            self._report(error, generation, step_version, final=final)
        return is_new

    def worked(self, folder: str, generation: int, step_version: int, *, is_whole: bool) -> bool:
        """The save worked, `is_whole`: on all members. Returns whether the last one had failed. Of
        what is published, the publication tells it."""
        was_failing, self._failing = self._failing is not None, None
        if was_failing and is_whole and self._what == "export":
            self._report(NotSaved(folder, ""), generation, step_version, final=False)
        return was_failing

    def _report(self, error: NotSaved, generation: int, step_version: int, *, final: bool) -> None:
        self._tell(
            CheckpointFailed(
                task=self._start.task,
                rank=self._start.rank,
                attempt=self._start.attempt,
                generation=generation,
                step_version=step_version,
                what=self._what,
                path=error.folder,
                why=error.why[:WHY_CHARS_MAX],
                errno=error.errno,
                final=final,
            )
        )
