"""The KV of sequences that were set aside: kept in the host's memory where that is quicker than
computing it again. Pure Python: what is to be copied is said, not done."""

from dataclasses import dataclass

from ssd_engine.kv_swap import Swap, SwapKind
from ssd_engine.pace import Average
from ssd_target.sequence import Kept, Sequence

MOST_KEYS = 1 << 30


@dataclass(frozen=True)
class KeptOptions:
    num_blocks: int  # that the host's memory may hold
    block_seconds: float  # to copy one out and in


class KeptKV:
    def __init__(self, options: KeptOptions, block_size: int, replay_rows: int) -> None:
        """``replay_rows``: tokens that a step can replay; 0: they are prefilled like the prompt."""
        self._options, self._block_size, self._replay_rows = options, block_size, replay_rows
        self._prefill, self._step = Average(), Average()  # seconds of a token, and of a step
        self._next_key = 1
        self.num_blocks = self.num_kept = 0  # blocks that are held now; sequences so far

    def prefilled(self, tokens: int, seconds: float) -> None:
        self._prefill.observe(seconds / max(1, tokens))

    def stepped(self, seconds: float) -> None:
        self._step.observe(seconds)

    def keep(self, sequence: Sequence) -> list[Swap]:
        """Before the sequence loses its blocks."""
        blocks = sequence.blocks[: -(-sequence.num_written // self._block_size)]
        room = self._options.num_blocks - self.num_blocks
        if not blocks or len(blocks) > room or not self._pays(sequence, len(blocks)):
            return []
        key, self._next_key = self._next_key, self._next_key % MOST_KEYS + 1
        sequence.kept = Kept(key, sequence.num_written, len(blocks))
        self.num_blocks += len(blocks)
        self.num_kept += 1
        return [Swap(SwapKind.OUT, key, 0, list(blocks))]

    def _pays(self, sequence: Sequence, num_blocks: int) -> bool:
        """What is not measured yet is taken to be slow."""
        prompt = min(sequence.num_written, len(sequence.prompt))
        said = sequence.num_written - prompt
        again = self._prefill.value() * (prompt if self._replay_rows else prompt + said)
        if self._replay_rows:
            again += self._step.value() * -(-said // self._replay_rows)
        return not self._prefill.known or num_blocks * self._options.block_seconds < again

    def bring_back(self, sequence: Sequence) -> list[Swap]:
        """After it was admitted: what of its KV the prefix cache does not have."""
        kept, lease = sequence.kept, sequence.lease
        if kept is None or lease is None:
            return []
        first = sequence.num_written // self._block_size
        swaps = self.drop(sequence)
        if sequence.num_written >= kept.num_written:
            return swaps
        lease.grow(kept.num_written)
        sequence.num_written = kept.num_written
        blocks = list(lease.blocks[first : kept.num_blocks])
        return [Swap(SwapKind.IN, kept.key, first, blocks)]

    def drop(self, sequence: Sequence) -> list[Swap]:
        kept, sequence.kept = sequence.kept, None
        if kept is None:
            return []
        self.num_blocks -= kept.num_blocks
        return [Swap(SwapKind.DROP, kept.key)]

    def check_integrity(self, waiting: list[Sequence]) -> None:
        held = sum(sequence.kept.num_blocks for sequence in waiting if sequence.kept)
        if held != self.num_blocks or not 0 <= held <= self._options.num_blocks:
            raise RuntimeError("kept KV integrity: blocks of no sequence")
