"""URLs of servers, as users give them."""

from __future__ import annotations

import contextlib
import urllib.parse


def check_url(text: str) -> str:
    """`text` if it is http://HOST:PORT or https://HOST, else a ValueError."""
    url = urllib.parse.urlsplit(text)
    known = url.scheme in ("http", "https") and url.hostname and not (url.query or url.fragment)
    with contextlib.suppress(ValueError):
        if known and url.port != 0:  # raises where it is no number
            return text
    raise ValueError(f"{text!r} is not http://HOST:PORT or https://HOST:PORT")
