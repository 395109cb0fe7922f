"""Confusion matrices of the classifier on labelled lines, by status and by severity.

`make confusion` prints the tables of docs/guides/detection.md; test_classify.py compares them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from unicron.control_plane.incidents.severity import TABLE
from unicron.workers.diagnosis.classifier import classify

DATA = Path(__file__).parents[1] / "data"
SAMPLES = {
    "the 108 development lines": "error_lines.jsonl",
    "further lines": "error_lines_more.jsonl",
    "the drawn lines": "error_lines_drawn.jsonl",
}
SEVERITIES = ("SEV1", "SEV2", "SEV3", "NONE")
NONE = "none"


def pairs(name: str) -> list[tuple[str, str]]:
    """(labelled status, status found) of each line of a sample."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [
        (line["status"] or NONE, classify(line["text"]).status or NONE)
        for line in map(json.loads, lines)
    ]


def tables() -> str:
    """The tables of all samples, as markdown."""
    return "\n".join(
        line for title, name in SAMPLES.items() for line in _tables(title, pairs(name))
    )


def _tables(title: str, found: list[tuple[str, str]]) -> Iterator[str]:
    right = sum(label == status for label, status in found)
    yield from (
        f"On {title}, {right} of {len(found)} have their row:",
        "",
        "| labelled | lines | found as labelled | found as something else | others found as this |",
        "|---|--:|--:|---|--:|",
    )
    for status in (*TABLE, NONE):
        answers = Counter(got for label, got in found if label == status)
        wrongly = sum(got == status != label for label, got in found)
        if answers or wrongly:
            others = ", ".join(
                f"{got} {num}" for got, num in answers.most_common() if got != status
            )
            yield (
                f"| {status} | {answers.total()} | {answers[status]} | {others or '-'} | "
                f"{wrongly} |"
            )
    yield from (
        "",
        "| severity labelled | " + " | ".join(f"found {one}" for one in SEVERITIES) + " |",
        "|---|" + "--:|" * len(SEVERITIES),
    )
    counts = Counter((TABLE.get(label, "NONE"), TABLE.get(got, "NONE")) for label, got in found)
    for label in SEVERITIES:
        yield f"| {label} | " + " | ".join(str(counts[label, got]) for got in SEVERITIES) + " |"
    yield ""


if __name__ == "__main__":
    print(tables(), end="")
