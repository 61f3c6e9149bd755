"""Which tests a worker runs one after the other, and which files come first.

A file stays on one worker, and so do files whose tests share services: each worker would start
those services for itself.
"""

from typing import Any

SHARING = {
    "speculation": "pair",
    "wire": "victims",
    "security": "guarded",
    "deploy": "watched",
}
_SHARED = {}

# Files that take longest, the longest first: no worker is left alone with one at the end.
LONGEST: tuple[str, ...] = ()


def group(node_id: str) -> str:
    """Tests of one group run on one worker."""
    file = node_id.split("::", 1)[0]
    return _SHARED.get(file, file)


def place_in_order(node_id: str) -> int:
    file = node_id.split("::", 1)[0].removeprefix("tests/")
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


def scheduler(config: Any, log: Any) -> Any:
    """For pytest-xdist, which may not be installed."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False  # the order is ours
    return GroupScheduling(config, log)
