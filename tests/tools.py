"""Tools that are no Python packages: used where they are there, else the test skips by name."""

import shutil

import pytest

from tests.scale import FULL


def needs_tool(name: str, *commands: str) -> pytest.MarkDecorator:
    """``commands``: what it may be called, where not by its name. In full mode nothing skips, so
    that the test fails by itself."""
    missing = not any(map(shutil.which, commands or (name,)))
    return pytest.mark.skipif(missing and not FULL, reason=f"needs {name}")
