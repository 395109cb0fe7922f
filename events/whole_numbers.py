"""The reader of whole numbers that others write: in queries, paths, file names, messages."""

DIGITS_NUM_MAX = 18
"""A number of so many digits fits 64 bits. Python's int() takes other scripts' digits and
underscores too, and raises beyond 4,300 digits."""


def whole_number(text: str | bytes) -> int | None:
    """The number that these ASCII digits write; None for another text, also for too many digits."""
    if text.isascii() and text.isdigit() and len(text) <= DIGITS_NUM_MAX:
        return int(text)
    return None
