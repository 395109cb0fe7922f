"""The OpenAPI 3.1 document, made from the table of routes and its types."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from unicron import __version__

from .messages import ENCODED, REFERENCE, Problem

if TYPE_CHECKING:
    from .routes import Route

HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Idempotency-Key": (
        "The same request, sent again with it, has no further effect",
        {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,128}$"},
    ),
    "If-Match": ("The ETag of the dry run", {"type": "string", "pattern": '^"[0-9]{1,18}"$'}),
    "Last-Event-ID": (
        "The seq of the last event; instead of `after`",
        {"type": "string", "pattern": "^[0-9]{1,18}$"},
    ),
}
"""Header -> description and schema."""


def document(routes: Iterable[Route]) -> bytes:
    """The document as JSON."""
    routes = list(routes)
    kinds = [
        Problem,
        *ENCODED,
        *(kind for one in routes for kind in (one.body, one.answer) if kind is not None),
    ]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    of_kind = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in routes:
        operation: dict[str, Any] = {
            "summary": one.summary,
            "operationId": _operation_id(one),
            "parameters": [*_parameters(one)],
            "responses": {
                "200": {
                    "description": "Done",
                    "content": {
                        kind: {"schema": of_kind[repr(one.answer)]} for kind in one.answered_as
                    },
                },
                "default": {
                    "description": "Refused, or not possible at present",
                    "content": {"application/problem+json": {"schema": of_kind[repr(Problem)]}},
                },
            },
        }
        if one.body is not None:
            needed = any(field.required for field in msgspec.structs.fields(one.body))
            operation["requestBody"] = {
                "required": needed,
                "content": {"application/json": {"schema": of_kind[repr(one.body)]}},
            }
        if one.role is None:
            operation["security"] = [{}, {"token": []}]
        else:
            operation["description"] = f"Needs the role `{one.role}`."
        paths.setdefault(one.path, {})[one.method.lower()] = operation
    return msgspec.json.format(
        msgspec.json.encode(
            {
                "openapi": "3.1.0",
                "info": {
                    "title": "Unicron",
                    "version": __version__,
                    "description": "Reads and requests of a control plane; docs/guides/api.md.",
                },
                "security": [{"token": []}],
                "paths": paths,
                "components": {
                    "schemas": components,
                    "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
                },
            }
        )
    )


def _parameters(route: Route) -> Iterable[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    query = msgspec.json.schema(route.query)["$defs"][route.query.__name__]["properties"]
    for name, schema in query.items():
        yield {"name": name, "in": "query", "schema": schema}
    for name in route.headers:
        text, schema = HEADERS[name]
        yield {
            "name": name,
            "in": "header",
            "description": text,
            "schema": schema,
            "required": name == "If-Match",
        }


def _operation_id(route: Route) -> str:
    """`postTasksCancel` for POST /v1/tasks/{task}/cancel."""
    words = re.findall(r"[a-z]+", re.sub(r"^/v1|{\w+}(?=/)|\.json", "", route.path))
    return route.method.lower() + "".join(word.title() for word in words)
