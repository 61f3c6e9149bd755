"""What is told of a link: failures are counted by reason and logged once."""

import logging
from collections import Counter

from ssd_target.links.link_errors import LinkBroken

log = logging.getLogger(__name__)

MAX_LOGGED = 8  # failures, until the link is steady again


class LinkReport:
    def __init__(self, number: int, address: str) -> None:
        self._number, self._address = number, address
        self.reason = "not tried yet"  # why it is not up
        self.draft_name = ""
        self.kind = ""  # of the draft, a name of KINDS; empty: it was never up
        self.failures: Counter[str] = Counter()  # epochs that failed, by reason
        self.unknown = 0  # frames and messages that only a newer endpoint understands
        self._steady = True  # it has not failed lately
        self._said_up = False  # since it failed
        self._logged: set[str] = set()  # failures since it was steady

    def up(self, draft_name: str, kind: str) -> None:
        self.reason, self.draft_name, self.kind = "", _printable(draft_name, 256), kind
        if self._steady:
            self._say_up()
        self._steady = False

    def steady(self) -> None:
        """Up for a while. One that comes up only to fail again is no news."""
        self._steady = True
        self._logged.clear()
        if not self._said_up:
            self._say_up()

    def _say_up(self) -> None:
        self._said_up = True
        about = {"link": self._number}
        draft = f"{self.draft_name}, {self.kind}"
        log.info("link to %s (%s) is up", self._address, draft, extra=about)

    def down(self, why: LinkBroken) -> None:
        """Said once: an endpoint that stays away is no news."""
        self.reason = _printable(str(why), 300)
        self.failures[why.reason] += 1
        self._said_up = False
        if self.reason not in self._logged and len(self._logged) < MAX_LOGGED:
            about = {"link": self._number}
            log.warning("link to %s is down: %s", self._address, self.reason, extra=about)
            self._logged.add(self.reason)


def _printable(text: str, length: int) -> str:
    """What an endpoint says, fit for a log."""
    return "".join(c if c.isprintable() else " " for c in text[:length])
