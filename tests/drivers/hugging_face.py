"""Hugging Face's transformers, installed once in build/transformers; and a look at an export.

`python tests/drivers/hugging_face.py CHECKPOINT FOLDER` prints what transformers makes of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "transformers==5.24.0"
FOLDER = ROOT / "build" / PACKAGE
INSTALL_S_MAX = 300.0
LOOK_S_MAX = 120.0
TEXT = "The ÄĀ\n 1, 'tis 𝄞  x"


class NotInstalled(Exception):
    """The package is not there and cannot be installed; `str()` says why."""


def installed() -> Path:
    """The folder with transformers and what it needs, without torch. Raises NotInstalled."""
    if FOLDER.is_dir():
        return FOLDER
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as made:
        install = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            "--only-binary",
            ":all:",
            "--target",
            f"{made}/packages",
            "-c",
            str(ROOT / "constraints.txt"),
            PACKAGE,
        ]
        try:
            done = subprocess.run(
                install, capture_output=True, text=True, check=False, timeout=INSTALL_S_MAX
            )
        except subprocess.TimeoutExpired:
            raise NotInstalled(f"{PACKAGE}: pip took {INSTALL_S_MAX:.0f} s") from None
        if done.returncode:
            raise NotInstalled(f"{PACKAGE}: {done.stderr.strip()[-200:]}")
        try:
            os.rename(f"{made}/packages", FOLDER)
        except OSError:  # another process was faster
            if not FOLDER.is_dir():
                raise
    return FOLDER


def look(path: Path, folder: Path) -> dict[str, Any]:
    """What transformers makes of the folder, an export of the checkpoint. Raises NotInstalled."""
    done = subprocess.run(
        [sys.executable, __file__, str(path), str(folder)],
        check=False,
        text=True,
        capture_output=True,
        timeout=LOOK_S_MAX,
        env={**os.environ, "PYTHONPATH": str(installed()), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _look(path: str, folder: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from unicron.workers.training.inference import decoder, stored_model

    ours = stored_model.load(path)
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokens = torch.arange(2 * ours.of.n_positions).view(2, -1) % ours.of.vocab_size
    prompt = list(b"The ")
    with torch.inference_mode():
        difference = (theirs(tokens).logits - ours(tokens)).abs().max().item()
        follows = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=4)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT)["input_ids"]
    return {
        "class": type(theirs).__name__,
        "dtype": str(theirs.dtype),
        "other_keys": [key for keys in loading.values() for key in keys],
        "difference": difference,
        "is_bytes": ids == list(TEXT.encode()),
        "is_decoded": tokenizer.decode(ids) == TEXT,
        "vocabulary": len(tokenizer),
        "generates_alike": follows[0].tolist()
        == prompt + decoder.generate(ours, prompt, 4, temperature=0),
    }


if __name__ == "__main__":
    print(json.dumps(_look(*sys.argv[1:])))
