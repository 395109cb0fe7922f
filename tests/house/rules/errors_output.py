"""Errors, output, and words about how the text was made."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .tree import Rules, files, imports, library, nodes

# The only files that may catch Exception: third-party code there must not end the process, nor may
# what only observes it, nor what one agent or one connection sends.
CATCH_ALL: tuple[str, ...] = (
    "control_plane/api/metrics.py",
    "control_plane/service/leader.py",
    "control_plane/service/sealer.py",
    "events/detached_thread.py",
    "events/log/intake.py",
    "events/object_storage.py",
    "workers/checkpoint_store/server.py",
)


# Words about how the text was made, not about Unicron. Spelled so that these lines do not match.
FOREIGN = re.compile(
    r"(?<![\w.])/wor[k]/|/roo[t]/|\bissu[e] #?\d|\bhelper agen[t]|"
    r"\b(this|that|another|earlier|previous|next|each) sessio[n]\b",
    re.IGNORECASE,
)


def no_broad_except(root: Path) -> list[str]:
    """`except Exception` only in CATCH_ALL, or to clean up and raise the exception again."""
    found: list[str] = []
    for name, tree in library(root):
        for node in nodes(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "BaseException"
            last = node.body[-1]
            again = isinstance(last, ast.Raise) and last.exc is None
            if re.search(r"\b(Base)?Exception\b", caught) and not again and name not in CATCH_ALL:
                found.append(f"{name}:{node.lineno} catches {caught}")
    return found


DECODING = "events/decoding.py"
"""The only file that may call the decoders of msgspec and json: they raise errors of four kinds."""
DECODERS = re.compile(r"(^|\.)(msgpack|json)\.(decode|decode_lines|Decoder|loads?|JSONDecoder)$")


def one_file_decodes(root: Path) -> list[str]:
    return [
        f"{name}:{line} uses {dotted}, not {DECODING}"
        for name, tree in library(root)
        if name != DECODING
        for line, dotted in (
            *imports(name, tree),
            *((n.lineno, ast.unparse(n)) for n in nodes(tree) if isinstance(n, ast.Attribute)),
        )
        if DECODERS.search(dotted)
    ]


CUTS_URLS = "events/network_address.py"
"""The only file that may call urlsplit and urlparse, which raise ValueError for half a bracket."""


def one_file_cuts_urls(root: Path) -> list[str]:
    return [
        f"{name}:{line} uses {dotted}, not {CUTS_URLS}"
        for name, tree in library(root)
        if name != CUTS_URLS
        for line, dotted in imports(name, tree)
        if dotted.endswith((".urlsplit", ".urlparse"))
    ]


def only_cli_prints(root: Path) -> list[str]:
    return [
        f"{name}:{node.lineno} prints"
        for name, tree in library(root)
        if not name.startswith("cli/")
        for node in nodes(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def no_foreign_words(root: Path) -> list[str]:
    found: list[str] = []
    for name, path in files(root):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name}:{n} {line.strip()[:60]}"
            for n, line in enumerate(lines, 1)
            if FOREIGN.search(line)
        ]
    return found


RULES: Rules = {
    no_broad_except: [
        {"cli/a.py": f"try:\n    f()\nexcept{what}:\n    pass\n"}
        for what in ("", " Exception", " (ValueError, Exception)", " BaseException as error")
    ],
    one_file_cuts_urls: [{"events/a.py": "from urllib.parse import urlsplit\n"}],
    one_file_decodes: [
        {"events/a.py": "import msgspec\nmsgspec.msgpack.decode(b'')\n"},
        {"workers/a.py": "from msgspec import json as j, msgpack\nmsgpack.Decoder(int)\n"},
        {"cli/a.py": "from msgspec.json import decode\n"},
        {"control_plane/a.py": "import json\njson.loads('')\n"},
    ],
    only_cli_prints: [{"events/a.py": "print(1)\n"}],
    no_foreign_words: [{"docs/a.md": "see /wor" + "k/main\n"}, {"a.py": "# issu" + "e 2\n"}],
}
