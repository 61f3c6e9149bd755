"""Which target serves a request: the same beginning goes to the same target, unless that is busier
than others by far. Pure, and the same in every gateway."""

from collections.abc import Sequence
from hashlib import blake2b

from ssd_gateway.targets.target import Target

SPARE_SHARE = 0.5  # of a target's places that its favourites may be ahead of the least busy one


def in_order(targets: Sequence[Target], key: bytes) -> list[Target]:
    """Targets in the order in which a request with this beginning should try them."""
    if len(targets) < 2:
        return list(targets)
    able = [each for each in targets if each.ready and not each.avoided] or targets
    least = min(each.load / each.room for each in able)
    by_key = sorted(targets, key=lambda each: _score(each.address, key))
    return sorted(by_key, key=lambda each: _rank(each, least))


def _rank(target: Target, least: float) -> tuple[bool, bool, float]:
    """Ready ones first, then those that nobody has left; of those, the ones that are not too busy
    are as good as each other."""
    share = target.load / target.room
    busy = share if share > least + SPARE_SHARE else 0.0
    return not target.ready, target.avoided, busy


def _score(address: str, key: bytes) -> bytes:
    """Rendezvous hashing: who comes or goes moves no prompt of the others."""
    return blake2b(address.encode() + b"\0" + key, digest_size=8).digest()
