"""The error tree.

UnicronError
├── UsageError            wrong input of a person: one line, a hint, exit 2
│   └── SpecError         a job spec that is malformed or can never fit; names the path
├── LogError
│   ├── Conflict          the log is not where the writer thought: fold it again
│   ├── Fenced            a newer epoch holds the log: this leader must stop
│   ├── Ambiguous         the reply was lost, the write may stand: fold the log again
│   ├── Unavailable       the server cannot be reached: retry with a limit
│   └── CorruptLog        a record is edited, missing, out of order or foreign; names the seq
└── ServerError           the embedded server did not start, or its directory is locked

A bug is none of these: it asserts. A fault of the cluster is a record, not an exception.
"""


class UnicronError(Exception):
    """Root of every error that Unicron raises on purpose."""


class UsageError(UnicronError):
    """Wrong input: `str()` is one line; `hint` is what to type next."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class SpecError(UsageError):
    """A job spec is refused; `path` is where, for example `train.batch.global`."""

    def __init__(self, path: str, message: str, hint: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message, hint)
        self.path = path


def need(holds: bool, path: str, message: str, hint: str = "") -> None:
    """Raises SpecError where something does not hold."""
    if not holds:
        raise SpecError(path, message, hint)


class LogError(UnicronError):
    """Something about the log."""


class Conflict(LogError):
    """The log's last seq is not the one that the writer expected."""


class Fenced(LogError):
    """A newer epoch has taken the log."""


class Ambiguous(LogError):
    """The reply to an append was lost: it may or may not have happened."""


class Unavailable(LogError):
    """The server cannot be reached."""


class CorruptLog(LogError):
    """A log that cannot be trusted from record `seq` on."""

    def __init__(self, seq: int, message: str) -> None:
        super().__init__(f"seq {seq}: {message}")
        self.seq = seq


class ServerError(UnicronError):
    """The embedded server did not start: `str()` is one line; `hint` is where to look."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
