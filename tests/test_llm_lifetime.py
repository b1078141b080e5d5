"""The end of an LLM, and what it does not survive: copies, pickles, forks."""

import copy
import gc
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Iterator

import pytest

from foredraft import LLM, ForedraftError, Sampling
from tests.support import tiny_models, tiny_seq2seq
from tests.support.child_process import answer

SHORT = Sampling(max_tokens=5, temperature=0, ignore_eos=True)
LONG = Sampling(max_tokens=60, temperature=0, ignore_eos=True)
HANG = 60.0  # seconds until a process is taken to hang


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("drafter", [None, "draft_model", "ngram", "eagle3", "auto"])
@pytest.mark.usefixtures("no_collector")
def test_an_llm_is_freed_with_its_last_reference(drafter: str | None) -> None:
    """The cyclic collector is not needed; otherwise two models would be in memory while one replaces another."""
    llm = LLM(drafter=drafter)
    llm.generate("def f(", SHORT)
    parts = [weakref.ref(part) for part in (llm, llm.engine, llm.target, llm.target.model, llm.target.fused)]
    del llm
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.usefixtures("no_collector")
def test_an_encoder_decoder_is_freed_with_its_last_reference() -> None:
    llm = LLM(tiny_seq2seq.make_model("t5"), None)
    llm.generate([5, 6, 7], SHORT)
    parts = [weakref.ref(part) for part in (llm, llm.engine, llm.target, llm.target.cross_kv)]  # type: ignore[attr-defined]
    del llm
    assert [part() for part in parts] == [None] * len(parts)


@pytest.mark.usefixtures("no_collector")
def test_a_closed_llm_is_freed_and_says_so() -> None:
    with tiny_models.plain().with_drafter("ngram") as llm:
        expected = llm.generate([5, 6], SHORT)[0].token_ids
        stream = llm.stream([7, 8], LONG)
        next(stream)
        other = llm.with_drafter(None)
        engine = weakref.ref(llm.engine)
    for use in (
        lambda: llm.generate([5, 6]),
        lambda: llm.stream([5, 6]),
        lambda stream=stream: next(stream),
        lambda: llm.prepare([5, 6], SHORT),
        lambda: llm.with_drafter(None),
        lambda: llm.calibrate(),
        lambda: llm.num_parameters,
    ):
        with pytest.raises(ForedraftError, match=r"^this LLM is closed; make another one$"):
            use()
    llm.close()  # again
    stream.close()
    del stream
    assert engine() is None
    assert other.generate([5, 6], SHORT)[0].token_ids == expected


def test_closing_ends_the_streams_of_other_threads() -> None:
    llm = tiny_models.plain().with_drafter(None)
    begun, errors = threading.Event(), []

    def read() -> None:
        try:
            while True:
                for _ in llm.stream([5, 6], LONG):
                    begun.set()
        except ForedraftError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(HANG)
    llm.close()
    thread.join(HANG)
    assert errors == ["this LLM is closed; make another one"]


def test_an_llm_is_neither_pickled_nor_copied_deeply() -> None:
    llm = tiny_models.plain().with_drafter("ngram")
    for use in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="make one in each process, or use with_drafter"):
            use(llm)
    expected = llm.generate([5, 6], SHORT)[0].token_ids
    assert copy.copy(llm).generate([5, 6], SHORT)[0].token_ids == expected


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(("method", "is_forked"), [("fork", True), ("spawn", False)])
def test_a_forked_process_is_refused_at_once_and_a_spawned_one_works(method: str, is_forked: bool) -> None:
    """After a fork the threads that a pass waits for are not there."""
    llm = LLM(drafter=None)
    expected = llm.generate("def f(", SHORT)[0].text
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context(method)
    process = context.Process(target=answer, args=(llm if is_forked else None, theirs))  # type: ignore[attr-defined]
    process.start()
    try:
        for _ in range(1 + is_forked):
            assert ours.poll(HANG), "the process hangs"
            found = ours.recv()
            assert ("get_context('spawn')" in found) if is_forked else (found == expected)
        process.join(HANG)
        assert process.exitcode == 0
    finally:
        process.kill()
    assert llm.generate("def f(", SHORT)[0].text == expected
