"""Requests with a grammar join the others when it is compiled, and only then."""

from ssd_engine.errors import InputError
from ssd_engine.grammar.compiler import GrammarCompiler
from ssd_engine.grammar.follower import GrammarFollower
from ssd_engine.grammar.spec import Grammar, GrammarKind
from ssd_engine.sampling.params import SamplingParams
from ssd_engine.text.completion import StopRules
from ssd_engine.text.token_ids import pack_tokens
from ssd_target.engine.grammar_admission import Admitted, GrammarAdmission
from ssd_target.records.engine_records import Submit
from ssd_target.records.speculation_options import Mode, SpeculationRequest
from tests.waiting import wait_until


def submit(sequence: int, source: str) -> Submit:
    sampling = SamplingParams(seed=0, grammar=Grammar(GrammarKind.REGEX, source))
    request = SpeculationRequest(Mode.OFF)
    return Submit(sequence, pack_tokens([5]), b"", sampling, StopRules(4), None, request)


def take_all(admission: GrammarAdmission) -> list[Admitted]:
    taken: list[Admitted] = []

    def all_taken() -> bool:
        taken.extend(admission.take(idle=True))
        return not len(admission)

    wait_until(all_taken)
    return taken


def test_each_is_taken_once_with_its_follower_or_with_what_is_wrong(
    compiler: GrammarCompiler,
) -> None:
    admission = GrammarAdmission(compiler)
    for sequence, source in enumerate(["a+", "(", "b+"]):
        admission.add(submit(sequence, source))
    assert len(admission) == 3
    results = {record.sequence: result for record, result in take_all(admission)}
    assert isinstance(results[0], GrammarFollower)
    assert isinstance(results[1], InputError)
    assert isinstance(results[2], GrammarFollower)
    assert admission.take(idle=False) == []


def test_what_is_cancelled_or_given_back_is_not_taken(compiler: GrammarCompiler) -> None:
    admission = GrammarAdmission(compiler)
    for sequence in range(3):
        admission.add(submit(sequence, f"a{{{sequence + 1}}}"))
    admission.cancel(1)
    admission.cancel(7)  # of another kind
    assert [record.sequence for record in admission.take_all()] == [0, 2]
    assert take_all(admission) == []
