"""What endpoints are told of a sequence's rounds: open, outcome, launch."""

from collections.abc import Callable
from hashlib import blake2b
from secrets import token_bytes

from ssd_engine.speculation.frames import Launch, Open, Outcome, Source, Verification
from ssd_engine.text.token_ids import pack_tokens
from ssd_target.speculation.endpoints.distributions import Distributions
from ssd_target.speculation.endpoints.draft_endpoints import DraftEndpoints
from ssd_target.speculation.endpoints.endpoint import DraftEndpoint
from ssd_target.speculation.endpoints.sequence_speculation import (
    RowSpeculation,
    SequenceSpeculation,
)
from ssd_target.speculation.pacing import Pacing

OWN = (Source.SYNC, Source.GRAMMAR)  # the target's, as its look-up is


class RoundFrames:
    """Frames go out with the endpoints' next flush."""

    def __init__(
        self,
        endpoints: DraftEndpoints,
        distributions: Distributions,
        pacing: Pacing,
        clock: Callable[[], float],
    ) -> None:
        self._endpoints, self._distributions = endpoints, distributions
        self._pacing, self._now = pacing, clock
        self._scope_key = token_bytes(16)

    def outcome(self, state: SequenceSpeculation) -> None:
        """Once for each round."""
        session, endpoint = state.session, self._endpoints.of(state)
        if endpoint is None or state.outcome_sent or session.decided is None:
            return
        endpoint.outbox.append(Outcome(state.sequence.id, session.round, *session.decided))
        state.outcome_sent = True

    def launch(self, row: RowSpeculation) -> None:
        """The endpoint that holds the sequence follows it into its next round."""
        state, session, endpoint = row.state, row.state.session, self._endpoints.held_by(row.state)
        self.outcome(state)
        session.launch(len(row.speculation))
        state.told_depth = self._depth_to_prepare(row, endpoint)
        self._distributions.expect(row)
        endpoint.say(
            Launch(
                state.sequence.id,
                session.round,
                row.speculation.tokens,
                Source.NGRAM if row.source in OWN else row.source,
                state.told_depth,
                self._pacing.verify_micros(),
            ),
            self._now(),
        )

    def open(self, row: RowSpeculation, endpoint: DraftEndpoint) -> None:
        """The endpoint holds the sequence from this round on."""
        state, sequence = row.state, row.state.sequence
        if endpoint.epoch is None:
            raise RuntimeError("an endpoint that is not connected was chosen")
        state.session.launch_open(len(row.speculation), endpoint.link, endpoint.epoch)
        state.told_depth = self._depth_to_prepare(row, endpoint)
        state.rejecting = (
            state.request.verification is Verification.REJECTION and endpoint.receiver is not None
        )
        endpoint.sequences.add(sequence.id)
        endpoint.say(
            Open(
                sequence.id,
                state.session.round,
                pack_tokens(sequence.prompt),
                pack_tokens(sequence.output),
                row.speculation.tokens,
                sequence.max_committed,
                sequence.sampling,
                Verification.REJECTION if state.rejecting else Verification.COUPLED,
                state.request.down_weight,
                state.told_depth,
                self._pacing.verify_micros(),
                state.request.trace_context,
                self._scope_number(sequence.scope),
            ),
            self._now(),
        )

    def _depth_to_prepare(self, row: RowSpeculation, endpoint: DraftEndpoint) -> int:
        """Nothing in rounds that an endpoint is compared with: on the target's device, its trees
        would slow them down."""
        return self._pacing.next_depth(row, endpoint) if endpoint.payoff.speculates else 0

    def _scope_number(self, scope: str) -> int:
        """Tells scopes apart for an endpoint, and nothing else about them."""
        digest = blake2b(scope.encode(), digest_size=8, key=self._scope_key).digest()
        return int.from_bytes(digest)
