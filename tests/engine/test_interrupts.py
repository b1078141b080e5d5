"""A step that is interrupted at any of its lines, under `LLM.stream`: the other streams lose nothing.

Guards against a token emitted twice or lost because Ctrl-C, a timeout or an error came between two lines that belong
together, and against a drafter that never drafts again after one.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import foredraft
from foredraft import LLM, Completion, Delta, Sampling
from foredraft.engine.engine import Engine
from foredraft.engine.sandbox import MAX_FAILURES
from tests.support import tiny_models
from tests.support.method_cases import METHOD_CASES

ROOT = str(Path(foredraft.__file__).parent)
STEP: CodeType = Engine.step.__wrapped__.__code__  # type: ignore[attr-defined]
Line = tuple[str, int]
VICTIM = [61, 62, 63, 64, 61, 62]
PROMPTS = [[33, 5], [50] * 5]
SAMPLINGS = [
    Sampling(max_tokens=60, temperature=0, ignore_eos=True, logprobs=1),
    Sampling(max_tokens=50, temperature=0.8, seed=4, ignore_eos=True, stop_token_ids=(96,), prompt_logprobs=1),
]
SHORT = Sampling(max_tokens=6, temperature=0.7, seed=9, ignore_eos=True)


class Watch:
    """Trace function over every line of the package below Engine.step; it raises at the chosen line."""

    def __init__(self, at: Line | None = None, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.error = at, error
        self.lines: dict[Line, None] = {}
        self.has_raised = False
        self._depth = 0

    def __enter__(self) -> "Watch":
        self._before = sys.gettrace()
        sys.settrace(self._trace_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace_call(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if frame.f_code is STEP:
            self._depth += 1
        is_ours = self._depth > 0 and frame.f_code.co_filename.startswith(ROOT)
        return self._line if is_ours else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "return" and frame.f_code is STEP:
            self._depth -= 1
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.lines[line] = None
            if line == self.at and not self.has_raised:
                self.has_raised = True
                raise self.error("here")
        return self._line


class Others:
    """Streams that live through every interrupt; one that ends is compared with plain decoding and begun again."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.num_compared = 0
        self._live = [self._begin(which) for which in range(len(PROMPTS))]

    def _begin(self, which: int) -> tuple[Iterator[Delta], list[int]]:
        stream = self.llm.stream(PROMPTS[which], SAMPLINGS[which])
        return stream, list(next(stream).token_ids)

    def go_on(self) -> None:
        """Read one delta of each stream."""
        for which, (stream, tokens) in enumerate(self._live):
            delta = next(stream)
            tokens += delta.token_ids
            if delta.completion is not None:
                self._compare(which, tokens, delta.completion)
                self._live[which] = self._begin(which)

    def end(self) -> None:
        for which, (stream, tokens) in enumerate(self._live):
            for delta in stream:
                tokens += delta.token_ids
            assert delta.completion is not None
            self._compare(which, tokens, delta.completion)

    def _compare(self, which: int, tokens: list[int], ours: Completion) -> None:
        theirs = plain(which)
        assert tokens == ours.token_ids == theirs.token_ids
        assert (ours.finish_reason, ours.stats.num_tokens) == (theirs.finish_reason, len(tokens))
        assert len(ours.logprobs or []) == len(theirs.logprobs or [])
        assert len(ours.prompt_logprobs or []) == len(theirs.prompt_logprobs or [])
        self.num_compared += 1


@cache
def plain(which: int) -> Completion:
    return tiny_models.plain().generate(PROMPTS[which], SAMPLINGS[which])[0]


def make_llm(method: str) -> LLM:
    drafter = None if method == "plain" else METHOD_CASES[method].make(3)
    return tiny_models.plain().with_drafter(drafter, verify="match")


def lines_of(llm: LLM) -> list[Line]:
    """List the lines of a step that may be interrupted, from the first step of a request to its end, beside others."""
    others = Others(llm)
    with Watch() as watch:
        list(llm.stream(VICTIM, SHORT))
    others.end()
    return list(watch.lines)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    ("method", "stride"),
    [
        *(("plain", 41), ("draft_model", 59), ("eagle", 127), ("ngram", 31)),
        *(pytest.param(method, 1, marks=pytest.mark.soak) for method in ("plain", "draft_model", "eagle", "ngram")),
    ],
)
def test_an_interrupt_at_any_line_of_a_step_changes_no_text_of_others(
    method: str, stride: int, error: type[BaseException]
) -> None:
    """Every `stride`-th line. The sandbox handles an error of a drafter; it does not handle an interrupt."""
    llm = make_llm(method)
    victim = llm.generate(VICTIM, SHORT)[0].token_ids
    lines, num_raised, num_injected, others = lines_of(llm), 0, 0, Others(llm)
    for line in lines[::stride]:
        if llm.engine.drafter.num_failures >= MAX_FAILURES:
            assert error is RuntimeError
            others.end()
            llm = make_llm(method)
            others = Others(llm)
        stream = llm.stream(VICTIM, SHORT)
        with Watch(line, error) as watch:
            try:
                tokens = [token for delta in stream for token in delta.token_ids]
            except error:
                num_raised += 1
            else:
                assert tokens == victim
        num_injected += watch.has_raised
        others.go_on()
    others.end()
    # The sandbox turns a drafter's errors into steps without a draft; an interrupt always reaches the caller.
    assert (num_raised if error is KeyboardInterrupt else num_injected) > len(lines) // stride // 2
    assert num_raised > 0
    assert others.num_compared >= 2
    if method != "plain" and llm.engine.drafter.num_failures < MAX_FAILURES:
        assert llm.generate(PROMPTS[1], SAMPLINGS[0])[0].stats.num_drafted > 0
    assert error is RuntimeError or not llm.engine.drafter.num_failures
    assert not llm.engine.has_work
