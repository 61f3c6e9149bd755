"""Modes ssd and auto: endpoints prepare while the target verifies.

An endpoint is compared with what rounds do without one, which is to draft with the model inside
where that pays, and plain decoding elsewhere.
"""

from ssd_engine.speculation.frames import Source
from ssd_target.records.speculation_options import Mode
from ssd_target.records.speculation_stats import DOWN, LookUp
from ssd_target.speculation.endpoints.draft_endpoints import DraftEndpoints
from ssd_target.speculation.endpoints.endpoint import DraftEndpoint
from ssd_target.speculation.endpoints.payoff import Payoff
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
)
from ssd_target.speculation.off import PlainDecoding
from ssd_target.speculation.pacing import Pacing
from ssd_target.speculation.round_frames import RoundFrames
from ssd_target.speculation.sync import SyncSpeculation


class EndpointSpeculation:
    """Mode ssd: rounds without an endpoint are fallbacks."""

    mode = Mode.SSD

    def __init__(
        self,
        endpoints: DraftEndpoints,
        frames: RoundFrames,
        pacing: Pacing,
        plain: PlainDecoding,
        inside: SyncSpeculation | None,
    ) -> None:
        """``inside``: the draft model inside, if rounds without an endpoint may use it."""
        self._endpoints, self._frames, self._pacing = endpoints, frames, pacing
        self._plain, self._inside = plain, inside

    def is_plain(self, state: SequenceSpeculation) -> bool:
        return (
            not state.session.attached
            and (self._inside is None or not self._inside.payoff.speculates)
            and not any(each.up and each.payoff.attaches for each in self._endpoints)
        )

    # Look up

    def look_up(self, state: SequenceSpeculation, num_rows: int) -> RowSpeculation:
        endpoint = self._endpoints.of(state)
        if endpoint is None or not endpoint.payoff.speculates:
            return self._go_without(state, num_rows, endpoint)
        row = RowSpeculation(state, self, self._pacing.depth(state, num_rows, endpoint))
        session = state.session
        if row.wanted and session.decided is not None:
            row.found = session.look_up(*session.decided, row.wanted)
            state.stats.looked_up(row.found)
            row.fill(Source.CACHE)
            row.missed = not row.speculation
        return row

    def _go_without(
        self, state: SequenceSpeculation, num_rows: int, endpoint: DraftEndpoint | None
    ) -> RowSpeculation:
        """No endpoint holds the sequence, or it does and these rounds are to compare it with."""
        if endpoint is None and self._misses_endpoint(state):
            self._fall_back(state, num_rows)
        if self._inside is None or not self._inside.payoff.speculates:
            return self._plain.look_up(state, num_rows)
        row = self._inside.row(state, num_rows)
        if endpoint is not None:
            row.wanted = min(row.wanted, endpoint.max_depth)  # a longer one it could not follow
        return row

    def _misses_endpoint(self, state: SequenceSpeculation) -> bool:
        """Whether a round without an endpoint is one that was asked for with one."""
        return True

    def _fall_back(self, state: SequenceSpeculation, num_rows: int) -> None:
        if not self._pacing.depth(state, num_rows, None):
            return
        state.stats.fell_back(state.why_detached)
        if state.why_detached in DOWN:
            state.stats.looked_up(LookUp.DISCONNECTED)

    # Launch

    def launch(self, row: RowSpeculation) -> None:
        state, session = row.state, row.state.session
        followed, prepared = session.attached, state.told_depth > 0
        endpoint = self._endpoints.of(state)
        if endpoint is not None and not endpoint.payoff.attaches:
            self._endpoints.leave(state, "does not pay")
        if session.attached:
            self._frames.launch(row)
        elif (endpoint := self._endpoints.choose(state, len(row.speculation))) is not None:
            self._frames.open(row, endpoint)
        else:
            session.launch(len(row.speculation))
        home = self._endpoints.home_of(state)
        if home is not None:
            row.under_speculation = home.payoff.speculates
            row.shows_payoff = self._shows_payoff(home.payoff, followed, prepared)

    def _shows_payoff(self, payoff: Payoff, followed: bool, prepared: bool) -> bool:
        """Whether a round is evidence. ``followed``: its endpoint had the sequence before;
        ``prepared``: and branches were asked of it."""
        if payoff.speculates:
            return followed and prepared
        # Until it is known how rounds without an endpoint go best, they say nothing of one.
        settled = self._inside is None or self._inside.payoff.current.follows_verdict
        return settled and (followed or not payoff.attaches)

    def observe(self, row: RowSpeculation, tokens: int, row_seconds: float) -> None:
        home = self._endpoints.home_of(row.state)
        if home is not None and row.shows_payoff:
            home.payoff.observe(row.under_speculation, tokens, row_seconds)
        if self._inside is not None and row.strategy is not self:
            self._inside.observe(row, tokens, row_seconds)

    def release(self, state: SequenceSpeculation, reason: str) -> None:
        if state.session.attached:
            self._endpoints.leave(state, reason)
        if self._inside is not None:
            self._inside.release(state, reason)


class FastestSpeculation(EndpointSpeculation):
    """Mode auto. Who names no mode asks for no endpoint by name: where none pays, none is missed;
    nor is one where the operator has none."""

    def _misses_endpoint(self, state: SequenceSpeculation) -> bool:
        return self._endpoints.expected and state.why_detached != "does not pay"
