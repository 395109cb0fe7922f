"""What the browser tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser.page import DEMO, Page, browsing, viewing


@pytest.fixture(scope="module")
def demo() -> Iterator[Page]:
    """The demo's log, with everything else down."""
    with viewing(DEMO) as url, browsing() as found:
        found.open(url)
        found.wait_text("inc-33")
        yield found
        assert found.errors() == []
