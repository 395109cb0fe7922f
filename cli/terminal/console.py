"""Output streams: data on stdout, messages on stderr."""

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress


def open_streams() -> None:
    """Open each closed standard stream (`>&-`, cron) on /dev/null. Otherwise the next file that is
    opened would get the number of that stream, and output would go into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)  # child processes need the stream too
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


_form = ["text"]
"""The form of `-o`."""


class PipeClosed(Exception):
    """The reader of stdout has closed the pipe, as in `unicron tail | head`."""


def write(text: str) -> None:
    """Print the text as it is on stdout and flush it for readers of a pipe. Raises PipeClosed."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise PipeClosed from None


def printable(text: str) -> str:
    """The text on one line: names and reasons of others may hold control characters, which a
    terminal obeys; they are escaped as Python does it."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def out(text: str = "") -> None:
    """Print one line on stdout, escaped. Raises PipeClosed."""
    write(printable(text) + "\n")


def lines(texts: Iterable[str]) -> None:
    """Print each text on a line of stdout. Raises PipeClosed."""
    for text in texts:
        out(text)


def structured(form: str) -> bool:
    """Whether `-o FORM` asks for data; `data` prints it as YAML from now on if it is `yaml`."""
    _form[:] = [form]
    return form in ("json", "jsonl", "yaml")


def data(document: object) -> None:
    """Print the document as a line of JSON, or with `-o yaml` as YAML. Raises PipeClosed."""
    if _form != ["yaml"]:
        write(json.dumps(document) + "\n")
        return
    import yaml

    write(
        yaml.dump(
            document,
            Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper),
            explicit_start=True,
            sort_keys=False,
        )
    )


def show(document: object, screen: Iterable[str], *, as_json: bool) -> None:
    """Print the screen, or with `as_json` the document. Raises PipeClosed."""
    if as_json:
        data(document)
    else:
        lines(screen)


def talk(text: str) -> None:
    """Print one line on stderr, escaped. A full disk or a closed terminal loses it: what speaks
    goes on."""
    with suppress(OSError):
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


def error(message: str, hint: str = "") -> None:
    """Print an error line and a hint on stderr."""
    talk("error: " + " ".join(message.split()))
    if hint:
        talk("hint: " + " ".join(hint.split()))
