"""The intake's grammar: what of the bytes in a list is a report that the log can hold."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ..decoding import from_msgpack
from ..records import codec
from ..records.codec import UnknownBody
from ..records.envelope import Report
from ..records.reports import NodeProbed
from ..records.types import INTEGER_NUM_MAX
from .identity import (
    Keys,
    is_report_signed,
    report_error,
    split_report,
    with_verified_proof,
)
from .port import REPORT_BYTES_MAX, Rejected, Sent

DEPTH_NUM_MAX = 32
"""How deeply the values of a report may be nested. Bodies need less than 8."""


def read_report(keys: Keys, sent: Sent) -> Report | Rejected:
    """The report of an entry of the intake, which may hold any bytes: it never raises. Nothing of
    an entry in a node's own list is decoded before its signature is that of the node."""
    source = sent.node
    try:
        if sent.num_bytes > REPORT_BYTES_MAX:
            why = f"it has {sent.num_bytes} bytes, and at most {REPORT_BYTES_MAX} are read"
            return Rejected(why, source, sent.data, sent.num_bytes)
        signature, wire = split_report(sent.data)
        if sent.node and not is_report_signed(keys(sent.node), signature, wire):
            why = "its signature is not the node's"
            return Rejected(why=why, source=source, data=sent.data)
        report = codec.decode_report(wire)
        source = report.source
        why = report_error(keys, report, signature, wire, sent.node) or report_fault(report)
        if not why and isinstance(report.body, NodeProbed):
            report = replace(report, body=with_verified_proof(keys, report.body))
    except msgspec.MsgspecError as error:
        why = f"it is unreadable: {error}"
    except Exception as error:  # noqa: BLE001 - one entry must not end the control plane
        why = f"it is unreadable: {error!r}"
    else:
        if not why:
            return report
    return Rejected(why=why, source=source, data=sent.data)


def report_fault(report: Report) -> str:
    """Why the log cannot hold a report, "": it can. Its integers are at most INTEGER_NUM_MAX, its
    values are those of JSON and not nested deeply: so every state, page and export can hold them.
    """
    body: object = report.body
    if isinstance(body, UnknownBody):  # kept as it came
        body = {"kind": body.kind, "v": body.version, "body": from_msgpack(body.raw)}
    where = _fault({"source_seq": report.source_seq, "body": body}, 0)
    return f"its{where}" if where else ""


def _fault(value: object, depth: int) -> str:
    """The path of the first value that is refused, and why; "" if there is none."""
    if isinstance(value, int):
        return "" if -INTEGER_NUM_MAX <= value <= INTEGER_NUM_MAX else " is an integer beyond 2^53"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f" is {value}"
    if value is None or isinstance(value, str):
        return ""
    if depth > DEPTH_NUM_MAX:
        return " is nested too deeply"
    items: Iterable[tuple[str, Any]]
    if isinstance(value, Struct):
        items = ((f" {name}", getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, dict):
        known = cast(Mapping[Any, Any], value)
        if not all(isinstance(key, str) or _is_number(key) for key in known):
            return " has a key that is neither text nor a number"
        items = ((f" {key}", item) for key, item in known.items())
    elif isinstance(value, list | tuple):
        if _are_small(cast(Sequence[Any], value)):
            return ""
        items = ((f" [{at}]", item) for at, item in enumerate(cast(Iterable[Any], value)))
    else:
        return f" is of type {type(value).__name__}"
    return next(
        (name[:40] + where for name, item in items if (where := _fault(item, depth + 1))), ""
    )


def _are_small(values: Sequence[Any]) -> bool:
    """Whether all are integers within the bounds: there may be a million."""
    return set(map(type, values)) == {int} and (
        min(values) >= -INTEGER_NUM_MAX and max(values) <= INTEGER_NUM_MAX
    )


def _is_number(key: object) -> bool:
    return isinstance(key, int) and not _fault(key, 0)
