"""Checks that a package index, such as PyTorch's, has a torch wheel for this Python and delivers its first megabyte.

    scripts/probe_index.py INDEX VERSION

Exits with 0 if pip can install from the index. Otherwise prints the reason and exits with 1. The script has no
timeout: its caller must limit the time.
"""

import os
import platform
import re
import ssl
import sys
import urllib.request
from urllib.parse import urljoin


def probe(index: str, version: str) -> None:
    """Raise an exception if `index` does not deliver a wheel of torch `version`."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)  # the same certificates as pip

    def read(url: str, size: int) -> bytes:
        request = urllib.request.Request(url, headers={"Range": f"bytes=0-{size - 1}"} if size > 0 else {})
        with urllib.request.urlopen(request, context=context) as answer:
            page: bytes = answer.read(size)
            return page

    url = f"{index.rstrip('/')}/torch/"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheel = rf'href="([^"]*/)?(torch-{re.escape(version)}(?:%2B|\+)?[a-z]*-{tag}-{tag}-[^"]*{platform.machine()}\.whl)'
    match = re.search(wheel, read(url, -1).decode(errors="replace"))
    if match is None:
        raise ValueError(f"no wheel of torch {version} for {tag} on {platform.machine()}")
    if not read(urljoin(url, (match[1] or "") + match[2]), 1 << 20).startswith(b"PK"):
        raise ValueError(f"{match[2]} is no wheel")


if __name__ == "__main__":
    try:
        probe(*sys.argv[1:])
    except Exception as error:
        print(str(error) or type(error).__name__)
        sys.exit(1)
