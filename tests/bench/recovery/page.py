"""Puts the last run into docs/guides/bench-recovery.md: `python -m bench.recovery.page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.recovery.rows import Row, table

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "guides" / "bench-recovery.md"
ROWS = ROOT / "build" / "bench" / "recovery.json"
BEGIN = "<!-- The results are written from build/bench/recovery.json. -->"
END = "<!-- End of the results. -->"


def filled(page: str, rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The page with these rows between its marks."""
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    text = table([Row(**one) for one in rows])
    said = f"{about['at']}, commit {about['commit']}, {about['cores']} cores; {versions}."
    return f"{head}{BEGIN}\n\n{said}\n\n```\n{text}\n```\n\n{END}{tail}"


def main() -> None:
    """Needs a run of `make bench-recovery`."""
    about = json.loads(ROWS.with_suffix(".about.json").read_text())
    PAGE.write_text(filled(PAGE.read_text(), json.loads(ROWS.read_text()), about))
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
