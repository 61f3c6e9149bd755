"""Processes with little memory and time, for what strangers have written."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ssd_engine.text.confined.process import (
    ConfinedProcess,
    ConfinedProcessEnded,
    QuestionRefused,
    QuestionsRefused,
    QuestionUnfinished,
)
from ssd_engine.text.confined.renderers import ChatRenderers, TakesLong
from tests.waiting import wait_until

MODULE = "ssd_engine.text.confined.chat_templates"
MEMORY = 256 << 20


@pytest.fixture
def process() -> Iterator[ConfinedProcess]:
    with closing(ConfinedProcess(MODULE, MEMORY, seconds=1)) as process:
        yield process


def render(process: ConfinedProcess, template: str, **names: object) -> str:
    return process.ask({"template": template, "names": names})


def child_of(process: ConfinedProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_one_process_answers_many_questions(process: ConfinedProcess) -> None:
    assert render(process, "{{ a }}", a="Zoë 🙂") == "Zoë 🙂"
    before = child_of(process)
    assert render(process, "{{ a }}!", a=1) == "1!"
    assert child_of(process) == before


def test_what_cannot_be_answered_says_why(process: ConfinedProcess) -> None:
    with pytest.raises(QuestionsRefused, match="unexpected end of template"):
        render(process, "{{ a")
    with pytest.raises(QuestionRefused, match="not with me"):
        render(process, "{{ raise_exception('not with me') }}")
    assert render(process, "still there") == "still there"


LONG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_question_with_a_budget_of_its_own_is_left_and_the_process_stays(
    process: ConfinedProcess,
) -> None:
    assert render(process, "here") == "here"
    before = child_of(process)
    for _ in range(2):
        with pytest.raises(QuestionUnfinished):
            process.ask({"template": LONG, "names": {}, "seconds": 0.01})
        assert process.ask({"template": "here", "names": {}, "seconds": 0.01}) == "here"
    assert child_of(process) == before


def test_only_who_has_a_first_budget_is_told_that_it_is_over() -> None:
    with closing(ChatRenderers(MEMORY, seconds=1)) as renderers:
        with renderers.first_budget():
            assert renderers.ask({"template": "here", "names": {}}) == "here"
            with pytest.raises(TakesLong):
                renderers.ask({"template": LONG, "names": {}})
        asked = {"template": LONG, "names": {}}
        with (
            renderers.patiently(),
            pytest.raises(ConfinedProcessEnded, match="1 s of processor time"),
        ):
            renderers.ask(asked)


def test_another_process_follows_one_that_took_too_much_or_was_killed(
    process: ConfinedProcess,
) -> None:
    with pytest.raises(ConfinedProcessEnded, match="1 s of processor time"):
        render(process, "{{ ((10 ** 300) ** 300) ** 300 }}")
    assert render(process, "here") == "here"
    os.kill(child_of(process), signal.SIGKILL)
    wait_until(lambda: process._process is not None and process._process.poll() is not None)
    assert render(process, "here") == "here"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_of_a_terminal_are_for_the_service(
    number: signal.Signals, process: ConfinedProcess
) -> None:
    render(process, "here")
    before = child_of(process)
    os.kill(before, number)
    assert render(process, "here") == "here"
    assert child_of(process) == before


def test_it_ends_with_its_pipe(process: ConfinedProcess) -> None:
    render(process, "here")
    child, pipe = process._process, process._pipe
    assert child is not None
    assert pipe is not None
    pipe.close()
    assert wait_until(lambda: child.poll() is not None)
    assert child.returncode == 0


def test_nothing_is_imported_from_where_it_is_started(
    process: ConfinedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    assert render(process, "here") == "here"
