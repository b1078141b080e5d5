"""Load: the closed loop and the end of its time, order of the runs, fields of a cell; engines, workers and servers."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from foredraft import ForedraftError, Sampling
from foredraft.bench import load, load_drivers, load_plot, load_report
from foredraft.bench.load import (
    AUTO,
    OFF,
    ClosedLoopResult,
    LoadBudget,
    LoadPoint,
    LoadRequest,
    LoadWorkload,
    RequestTimeline,
    SlicedLoop,
    run_in_turns,
)
from foredraft.bench.load_drivers import AsyncStreamDriver, EngineDriver, OpenAIEndpoint, StreamDelta, WorkerDriver
from foredraft.bench.pass_limits import PassLimits
from foredraft.llm import LLM, MemoryLimits
from foredraft.outputs import Stats
from tests.support import tiny_models

GREEDY = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ((5, 6, 7, 5, 6, 7), (8, 9, 10), (11,) * 5)
WORK = LoadWorkload(PROMPTS, max_tokens=8, waves=2, min_requests=4)


def test_requests_are_the_same_for_all_and_move_on_with_the_round():
    assert WORK.make_requests(4, 0) == WORK.make_requests(4, 0)
    assert WORK.make_requests(4, 0) != WORK.make_requests(4, 1)
    assert [len(WORK.make_requests(streams, 0)) for streams in (1, 2, 4)] == [4, 4, 8]
    assert [len(WORK.make_requests(streams, -1)) for streams in (1, 4, 9)] == [4, 4, 9]
    assert {job.prompt for job in WORK.make_requests(4, 0)} == set(PROMPTS)


def test_lengths_are_spread_around_the_mean():
    lengths = [job.max_tokens for job in LoadWorkload(PROMPTS, 100, 1, 400).make_requests(1, 0)]
    assert 50 <= min(lengths) < 53
    assert 147 < max(lengths) <= 150
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.02)


def test_a_pool_of_the_requested_memory_preempts_no_request():
    llm = tiny_models.plain().with_drafter(None)
    llm.limits = MemoryLimits(kv_tokens=WORK.count_kv_tokens(6), max_batch=6)
    llm = llm.with_drafter("ngram", 4)
    EngineDriver(llm, GREEDY).run(WORK.make_requests(6, 0), 6)
    assert llm.engine.scheduler.num_preempted == 0


def test_quantiles_are_weighted():
    assert load.compute_quantile([(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 1)], 0.5) == 2.0
    assert load.compute_quantile([(4.0, 97), (9.0, 3)], 0.97) == 4.0
    assert load.compute_quantile([(9.0, 3), (4.0, 97)], 0.99) == 9.0
    assert load.compute_quantile([], 0.5) is None


def test_the_time_between_tokens_of_one_text():
    timeline = RequestTimeline(1.0, [(1.5, 2), (2.5, 1), (4.5, 4)])
    assert timeline.first_token_seconds == 0.5
    assert list(timeline.iter_gaps()) == [(1.0, 1), (2.0, 4)]
    assert timeline.num_tokens == 7
    assert RequestTimeline(1.0).first_token_seconds is None


@dataclass
class Timed:
    """Writes a fixed number of tokens per second, in deltas of two. One minute of the machine slows all requests."""

    name: str
    speed: float
    log: list[str]
    machine: dict[str, float] = field(default_factory=lambda: {"now": 0.0, "slow": 1.0})
    stats: Stats | None = None

    def run_slices(self, jobs: Sequence[LoadRequest], concurrency: int) -> SlicedLoop:
        yield from ()
        self.log.append(self.name)
        pace = self.machine["slow"] / self.speed
        times = [(2 * pace * (i + 1), 2) for i in range(5)]
        self.machine["now"] += times[-1][0]
        return ClosedLoopResult(times[-1][0], (RequestTimeline(0.0, times, self.stats),))

    def close(self) -> None: ...

    def perf_counter(self) -> float:
        return self.machine["now"]


def test_modes_take_turns_and_a_slow_minute_changes_no_ratio():
    log: list[str] = []
    stats = Stats(num_tokens=10, num_drafts=4, num_drafted=12, num_accepted=6, target_passes=4)
    drivers = {
        OFF: Timed(OFF, 10.0, log),
        AUTO: Timed(AUTO, 19.0, log, stats=stats),
        "4": Timed("4", 5.0, log),
        "2": Timed("2", 20.0, log),
    }
    machine = drivers[OFF].machine
    for driver in drivers.values():
        driver.machine = machine

    def step(title: str) -> None:
        machine["slow"] = 9.0 if "round 2" in title else 1.0

    point = load.measure(drivers, WORK, 3, LoadBudget(max_rounds=3), step)
    assert log == [OFF, AUTO, "4", "2", OFF, AUTO, "4", "2", AUTO, "4", "2", OFF, "4", "2", OFF, AUTO]
    cells = {cell.mode: cell for cell in point.cells}
    assert {name: round(cell.over_off, 6) for name, cell in cells.items()} == {OFF: 1, AUTO: 1.9, "4": 0.5, "2": 2}
    assert (point.best_fixed, point.auto_over_best) == ("2", pytest.approx(0.95))
    auto = cells[AUTO]
    assert (auto.acceptance_length, auto.drafted) == (2.5, 3.0)
    assert cells[OFF].acceptance_length is None
    assert auto.gap_p50 == pytest.approx(2 / 19)
    assert auto.token_p50 == pytest.approx(1 / 19)
    assert auto.first_p99 == pytest.approx(18 / 19)
    assert (auto.rounds, auto.requests, auto.tokens) == (3, 3, 30)


@pytest.mark.parametrize(("seconds", "rounds"), [(None, 6), (1e9, 6), (0.0, 2), (9.5, 3)])
def test_rounds_that_would_end_too_late_are_not_begun(monkeypatch, seconds, rounds):
    """The warm-up takes two seconds, and so does a round."""
    driver = Timed(OFF, 5.0, [])
    monkeypatch.setattr(load, "time", driver)
    point = load.measure({OFF: driver}, WORK, 1, LoadBudget(max_rounds=6, max_seconds=seconds))
    assert point.cells[0].rounds == rounds


def test_a_round_without_tokens_is_no_figure():
    empty = ClosedLoopResult(1.0, (RequestTimeline(0.0),))
    with pytest.raises(ForedraftError, match="no token came"):
        load.build_point(1, {OFF: [empty], AUTO: [empty]})


def record_batch_sizes(llm: LLM) -> list[int]:
    """Record how many requests each step runs."""
    seen: list[int] = []
    step = llm.engine.step

    def step_and_count() -> None:
        step()
        seen.append(len(llm.engine.transcripts))

    llm.engine.step = step_and_count  # type: ignore[method-assign]
    return seen


def test_the_engine_keeps_all_streams_busy_until_one_finds_nothing():
    llm = tiny_models.plain().with_drafter("ngram", 2)
    clock = count()
    seen = record_batch_sizes(llm)
    jobs = WORK.make_requests(3, 0)
    loop = EngineDriver(llm, GREEDY, clock=lambda: float(next(clock))).run(jobs, 3)
    assert len(loop.timelines) == len(jobs) == 6
    assert max(seen) <= 3
    whole = [t for t, job in zip(loop.timelines, jobs, strict=True) if t.num_tokens == job.max_tokens]
    assert 4 <= len(whole) < 6, "two streams were still busy when the third found nothing, or one of them"
    assert all(t.stats is not None and t.stats.num_tokens == t.num_tokens for t in loop.timelines)
    assert loop.seconds > 0
    assert not llm.engine.has_work
    assert llm.engine.scheduler.allocator.num_used == 0


def test_engines_take_turns_and_their_pauses_do_not_count():
    """Each reading of the clock is a second later, so every step fills a slice."""
    clock, order = count(), list[str]()
    loops = {}
    for name in ("a", "b"):
        llm = tiny_models.plain().with_drafter("ngram", 2)
        step = llm.engine.step
        llm.engine.step = lambda name=name, step=step: (order.append(name), step())  # type: ignore[method-assign]
        driver = EngineDriver(llm, GREEDY, clock=lambda: float(next(clock)))
        loops[name] = driver.run_slices(WORK.make_requests(3, 0), 3)
    results = run_in_turns(loops)
    assert order == ["a", "b"] * (len(order) // 2)
    alone = EngineDriver(tiny_models.plain().with_drafter("ngram", 2), GREEDY).run(WORK.make_requests(3, 0), 3)
    assert [[n for _, n in t.arrivals] for t in results["a"].timelines] == [
        [n for _, n in t.arrivals] for t in alone.timelines
    ]
    assert results["a"].seconds + results["b"].seconds < next(clock)
    clock = count()
    single = EngineDriver(tiny_models.plain().with_drafter("ngram", 2), GREEDY, clock=lambda: float(next(clock)))
    assert single.run(WORK.make_requests(3, 0), 3).seconds == results["a"].seconds


def test_no_prompt_is_found_again_in_the_cache():
    llm = tiny_models.plain().with_drafter(None)
    driver = EngineDriver(llm, GREEDY)
    jobs = [LoadRequest(tuple(range(5, 45)), 4)] * 3
    driver.run(jobs, 1)
    driver.run(jobs, 1)
    assert llm.engine.scheduler.prefix_hits == 0


def test_a_request_that_fails_is_an_error_and_no_figure():
    llm = tiny_models.plain().with_drafter(None)
    llm.engine.target = Poisoned(llm.engine.target)
    with pytest.raises(ForedraftError, match="a request failed: the model returned invalid logits"):
        EngineDriver(llm, GREEDY).run(WORK.make_requests(1, 0), 1)


class Poisoned:
    """A target whose logits are no distribution."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> object:
        return getattr(self._target, name)

    def forward(self, *args: object) -> object:
        logits, features = self._target.forward(*args)  # type: ignore[attr-defined]
        return logits * float("nan"), features


def test_a_worker_writes_what_the_engine_writes():
    jobs = WORK.make_requests(1, 0)
    here = EngineDriver(tiny_models.plain().with_drafter("ngram", 2), GREEDY).run(jobs, 1)
    llm = tiny_models.plain().with_drafter("ngram", 2)
    driver = WorkerDriver(llm, GREEDY)
    try:
        for concurrency in (1, 3):
            driver.run(jobs, concurrency)
            assert llm.engine.scheduler.allocator.num_used == 0, "aborted requests are gone before the next round"
        there = driver.run(jobs, 1)
    finally:
        driver.close()
    assert [t.num_tokens for t in there.timelines] == [job.max_tokens for job in jobs]
    assert [[n for _, n in t.arrivals] for t in there.timelines] == [[n for _, n in t.arrivals] for t in here.timelines]
    assert [t.stats and t.stats.num_tokens for t in there.timelines] == [t.num_tokens for t in there.timelines]


def streams(log: list[str], error: str | None = None) -> AsyncStreamDriver:
    """Return a driver whose requests have four deltas each; `log` records every start and end."""

    async def opener(job: LoadRequest):
        log.append(f"begin {job.max_tokens}")
        try:
            for i in range(4):
                await asyncio.sleep(0.001 * job.max_tokens)
                if error is not None and i == 2:
                    raise ForedraftError(error)
                yield StreamDelta(1, Stats(num_tokens=4) if i == 3 else None)
            log.append(f"end {job.max_tokens}")
        finally:
            log.append(f"left {job.max_tokens}")

    @asynccontextmanager
    async def session():
        yield opener
        log.append("closed")

    return AsyncStreamDriver(session)


def test_streams_that_are_left_over_are_stopped_and_do_not_count():
    log: list[str] = []
    loop = streams(log).run([LoadRequest((1,), 1), LoadRequest((1,), 500)], 2)
    assert log == ["begin 1", "begin 500", "end 1", "left 1", "left 500", "closed"]
    assert [t.num_tokens for t in loop.timelines] == [4, 0]
    assert loop.timelines[0].stats == Stats(num_tokens=4)
    assert 0 < loop.seconds < 1


def test_a_stream_that_fails_ends_the_run():
    with pytest.raises(ForedraftError, match="out of order"):
        streams([], error="out of order").run([LoadRequest((1,), 1)] * 4, 2)


EVENTS = [
    {"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}},
    {"choices": [{"text": "bcd"}], "usage": {"completion_tokens": 4}},
    {
        "choices": [],
        "usage": {"completion_tokens": 4},
        "metrics": {
            "speculative_decoding": {
                "num_accepted_draft_tokens": 2, "num_spec_steps": 1, "draft_acceptance_rate": 0.5
            }
        },
    },
]  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    bodies: list[dict[str, object]]
    events: list[dict[str, object]]

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "small"}]}).encode())

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.headers.get("Authorization") != "Bearer secret":
            self._answer(401, b'{"error": "no key"}')
            return
        self._answer(200, b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in self.events) + b"data: [DONE]")

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def server() -> Iterator[tuple[str, type[Handler]]]:
    handler = type("Fresh", (Handler,), {"bodies": [], "events": EVENTS})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}/v1", handler
        made.shutdown()
        thread.join()


def test_a_server_is_asked_in_openais_words_and_counts_its_tokens(server):
    url, handler = server
    name = load_drivers.fetch_model_name(url, "secret")
    drivers = [OpenAIEndpoint(url, name, GREEDY, length, "secret").create_driver() for length in (0, None)]
    loops = [driver.run([LoadRequest((5, 6), 7), LoadRequest((8,), 9)], 1) for driver in drivers]
    for loop in loops:
        assert [[n for _, n in t.arrivals] for t in loop.timelines] == [[1, 3], [1, 3]]
        assert loop.timelines[0].stats == Stats(4, 1, 4, 2, target_passes=2)
    first = handler.bodies[0]
    assert {k: first[k] for k in ("model", "prompt", "max_tokens", "temperature", "ignore_eos", "stream")} == {
        "model": "small", "prompt": [5, 6], "max_tokens": 7, "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    assert [body.get("speculative") for body in handler.bodies] == [{"num_speculative_tokens": 0}] * 2 + [None] * 2
    assert len({body["cache_salt"] for body in handler.bodies}) == 4


def test_what_a_server_refuses_is_said(server):
    url, handler = server
    with pytest.raises(ForedraftError, match=r'answered 401: \{"error": "no key"\}'):
        OpenAIEndpoint(url, "small", GREEDY, None, "wrong").create_driver().run([LoadRequest((5,), 7)], 1)
    handler.events = [{"error": {"message": "overloaded"}}]
    with pytest.raises(ForedraftError, match="overloaded"):
        OpenAIEndpoint(url, "small", GREEDY, None, "secret").create_driver().run([LoadRequest((5,), 7)], 1)
    with pytest.raises(ForedraftError, match=r"no server answers at .*; give --url as"):
        load_drivers.fetch_model_name("http://127.0.0.1:9", None)


def points() -> list[LoadPoint]:
    def loops(speed: float) -> list[ClosedLoopResult]:
        return [ClosedLoopResult(1.0, (RequestTimeline(0.0, [(0.1, round(speed * k))]),)) for k in (1, 1, 2)]

    few = load.build_point(1, {OFF: loops(10), AUTO: loops(20), "2": loops(21), "4": loops(18)})
    return [few, load.build_point(8, {OFF: loops(10), AUTO: loops(10), "4": loops(6)})]


def test_the_tables_say_what_was_not_measured():
    ratios = load_report.build_ratio_table(points())
    assert ratios.header[2:6] == ("limit of off", "auto / off", "K = 2 / off", "K = 4 / off")
    assert ratios.rows[0] == ("1", "10.0", "-", "2.00x", "2.10x", "1.80x", "K = 2", "0.95x")
    assert ratios.rows[1] == ("8", "10.0", "-", "1.00x", "-", "0.60x", "K = 4", "1.67x")
    cells = load_report.build_cell_table([cell for point in points() for cell in point.cells])
    assert cells.rows[0][:6] == ("1", "off", "10.0", "-", "1.00x", "1.00 1.00")
    assert cells.rows[0][8] == "-", "one delta has no gap"


def test_cells_have_the_limit_of_their_passes():
    stats = Stats(num_tokens=30, num_drafts=10, num_drafted=40, target_passes=10)
    loops = [ClosedLoopResult(1.0, (RequestTimeline(0.0, [(0.1, 30)], stats),)) for _ in range(3)]
    limits = PassLimits(weight_bytes=10**9, num_weights=10**6, gigabytes_per_second=10.0, gigaflops=100.0)
    point = load.build_point(4, {OFF: loops}, limits)
    assert point.cells[0].limit_tokens_per_second == pytest.approx(4 * 3 / 0.1)
    assert load_report.build_cell_table(point.cells).rows[0][2:4] == ("30.0", "120 (25 %)")
    assert load_report.build_ratio_table([point]).rows[0][:3] == ("4", "30.0", "120 (25 %)")


def test_the_plot_is_a_picture(tmp_path):
    load_plot.save_load_plot([("a", points()), ("b", points()[:1])], "caption", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
