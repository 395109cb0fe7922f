"""The error tree.

UnicronError              exit code 1; cli/cluster/client.py, Unreachable and Interrupted: 3;
                          an agent's NodeRevoked: 77
├── UsageError            wrong user input: one line, a hint, exit code 2
│   └── SpecError         a job spec is malformed or can never fit; names the path
├── LogError
│   ├── Conflict          the log's last seq is not the expected one: fold the log again
│   ├── Fenced            a newer epoch holds the log: this leader must stop
│   ├── Leased            another control plane holds the lease: follow it
│   ├── Ambiguous         the reply was lost, the write may have happened: fold the log again
│   ├── Unavailable       the server cannot be reached: retry with a limit; exit code 3
│   ├── TooLarge          the server would refuse the append: it was not sent
│   ├── NewerLog          a record of a later version, without which the state would be wrong
│   └── CorruptLog        a record is edited, missing, out of order or foreign; names the seq
│       └── Pruned        the record is not there, because `log prune` removed it
└── ServerError           the embedded server did not start, or its directory is locked

A bug raises AssertionError instead. A fault of the cluster is a record, not an exception.
"""


class UnicronError(Exception):
    """Base class of the errors that Unicron raises deliberately. `str()` is one line. `hint` says
    what to type or to check next; "": there is none."""

    hint = ""
    exit_code = 1

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint or self.hint


class UsageError(UnicronError):
    """Wrong user input."""

    exit_code = 2


class SpecError(UsageError):
    """A job spec is refused. `path` names the field, for example `train.batch.global`."""

    def __init__(self, path: str, message: str, hint: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message, hint)
        self.path = path


def need(holds: bool, path: str, message: str, hint: str = "") -> None:
    """Raise SpecError unless the condition holds."""
    if not holds:
        raise SpecError(path, message, hint)


class LogError(UnicronError):
    """Base class of errors of the log."""


class Conflict(LogError):
    """The log's last seq is not the one that the writer expects."""


class Fenced(LogError):
    """A newer epoch has taken the log."""


class Leased(LogError):
    """Another control plane leads, at `url`."""

    def __init__(self, url: str) -> None:
        super().__init__(f"the control plane at {url} leads")
        self.url = url


class Ambiguous(LogError):
    """The reply was lost: the write may or may not have happened."""


class Unavailable(LogError):
    """The server cannot be reached."""

    exit_code = 3


class TooLarge(LogError):
    """An append is larger than the server takes, and was not sent: it would always fail."""


class NewerLog(LogError):
    """The log has a record that only a later Unicron can fold."""

    exit_code = 2


class CorruptLog(LogError):
    """The log is invalid from record `seq` on."""

    hint = "unicron log verify"

    def __init__(self, seq: int, message: str, hint: str = "") -> None:
        super().__init__(f"seq {seq}: {message}", hint)
        self.seq = seq


class Pruned(CorruptLog):
    """Records before `first` were asked for, and `log prune` has removed them."""

    hint = "unicron log status"

    def __init__(self, first: int) -> None:
        super().__init__(first, f"the log begins here: records 1 to {first - 1} were pruned")


class ServerError(UnicronError):
    """The embedded server did not start."""
