"""The launcher of Megatron-LM's scripts on other versions than it knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from unicron.events.errors import UsageError
from unicron.workers.training.megatron_lm import versions

KNOWN = ("0.16", "0.17", "0.18", "0.19", "0.20")


@pytest.mark.parametrize("version", ["0.15.3", *(f"{known}.1" for known in KNOWN), "0.21.0"])
def test_only_known_versions_are_run(
    tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    major, minor, _ = version.split(".")
    (core / "package_info.py").write_text(
        f"MAJOR, MINOR, __version__ = {major}, {minor}, {version!r}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    if version.startswith(KNOWN):
        assert version.startswith(versions.interface().version)
        return
    with pytest.raises(
        UsageError, match=(f"this is Megatron-LM {version} .* 0.16, 0.17, 0.18, 0.19 and 0.20$")
    ) as told:
        versions.interface()
    assert "core_v0.16.1" in told.value.hint
