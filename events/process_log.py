"""How control plane, read process and agent log."""

import os
import sys
from typing import TextIO, cast

import structlog

from .process_io import LogStream


def configure_logging() -> None:
    """Log by structlog on stderr: text on a terminal, else JSON lines."""
    stderr = sys.stderr
    last = (
        structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ)
        if stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            last,
        ],
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, LogStream(stderr))),
    )
