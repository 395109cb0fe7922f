"""The dashboard's page and its assets, as `make web` built them from control_plane/web."""

import mimetypes
import re
from pathlib import Path

from aiohttp import web

BUILT = Path(__file__).parents[1] / "web" / "dist"
PATH = re.compile(r"/(assets/[A-Za-z0-9_-][A-Za-z0-9._-]*)?\Z")
NOT_BUILT = b"""<!doctype html><html lang="en"><title>Unicron</title>
<h1>Unicron</h1><p>The dashboard is not built here. Run <code>make web</code> in a checkout, then
load this page again. <code>unicron status</code> shows the same in a terminal.</p></html>
"""
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


async def page(request: web.Request) -> web.Response:
    """The page itself, or a file of it. The page holds no data: that needs a session."""
    name = request.path[1:] or "index.html"
    try:
        body = (BUILT / name).read_bytes()
    except OSError:
        if name != "index.html":
            raise web.HTTPNotFound() from None
        body = NOT_BUILT
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    cache = "no-cache" if name == "index.html" else "max-age=31536000, immutable"
    return web.Response(
        body=body,
        content_type=kind,
        headers=HEADERS | {"Cache-Control": cache},
        charset="utf-8" if kind.startswith("text/") else None,
    )
