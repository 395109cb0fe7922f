"""Changes of a script's text do not depend on its layout, and do not go past what they name."""

from __future__ import annotations

import pytest
from source_changes import changed

SCRIPT = """
import time
loop = adopt(
    build=build,
    lr=LR,
    min_lr=LR / 10,
)
for x in loop:
    step(x)
"""


@pytest.mark.parametrize(
    ("old", "new", "made"),
    [
        ("lr=LR, min_lr=LR / 10)", "lr=0)", "    build=build,\n    lr=0)\n"),
        ("adopt(build=build", "adopt(build=other", "loop = adopt(build=other,\n"),
        ("    step(x)\n", "    step(x)\n    stop()\n", "loop:\n    step(x)\n    stop()\n"),
        ("import time", r"import \1", "\nimport \\1\n"),
    ],
)
def test_the_layout_does_not_matter(old: str, new: str, made: str) -> None:
    assert made in changed(SCRIPT, [(old, new)])


@pytest.mark.parametrize("old", ["importtime", "lr = RATE", "  step(x)\nx", "in(x)"])
def test_what_is_not_there_is_an_error(old: str) -> None:
    with pytest.raises(AssertionError, match="the script has no "):
        changed(SCRIPT, [(old, "")])
