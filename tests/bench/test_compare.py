"""Comparisons: peers as processes that stop, fail and vanish; the rows and leads that come of it."""

import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.bench import compare, compare_report, subprocess_peer
from foredraft.bench.compare_report import MAX_CONTEXT, choose_length
from foredraft.bench.methods import BenchMethod
from foredraft.bench.participants import FOREDRAFT, Participant, PeerPythons, iter_participants
from foredraft.bench.pass_limits import find_median_limits
from foredraft.bench.questions import Question
from foredraft.bench.stream_speeds import StreamSpeed, StreamsPlan
from foredraft.bench.subprocess_peer import PEERS_FOLDER, PeerError, SubprocessPeer
from foredraft.errors import ForedraftError
from tests.support import tiny_models

# Answers one more than the last token, and again; what else it does is decided by the mode.
FAKE = """
import os, sys, time
from serve import serve

def load(**job):
    print("a library says something on standard output")
    if job.get("fault") == "load":
        raise RuntimeError("no such\\n  weights")
    if job.get("fault") == "crash":
        raise SystemExit("ImportError: nothing here")
    load.pace, load.fault = job.get("pace", 1.0), job.get("fault")
    return {"version": "fake " + str(job["threads"]) + os.environ["OMP_NUM_THREADS"]}

def generate(mode, prompt, max_tokens, **rest):
    if mode == "raises":
        raise ValueError("cannot")
    if mode == "dies":
        sys.stderr.write("Traceback\\nKilledError: gone\\n")
        os._exit(3)
    if mode == "hangs":
        time.sleep(60)
    step = 2 if mode == "other" else 1
    tokens = [(prompt[-1] + step * (i + 1)) % 97 for i in range(max_tokens)]
    return {"tokens": tokens, "seconds": load.pace * max_tokens, "passes": max_tokens // 2 * (mode != "uncounted")}

def verify(rows, context, repeats):
    return {"seconds": {str(k): 1.0 + k for k in rows}}

def limits():
    if load.fault == "limits":
        raise RuntimeError("no packed weights")
    limits.calls = getattr(limits, "calls", 0) + 1
    speed = float(limits.calls)
    return {"weight_bytes": 10**9, "num_weights": 5 * 10**8, "gigabytes_per_second": speed, "gigaflops": 10 * speed}

def streams(prompts, max_tokens):
    if load.fault == "streams":
        raise RuntimeError("no memory")
    return {"tokens": [[0] * max_tokens for _ in prompts], "seconds": load.pace * len(prompts[0])}

def ticks():
    began = time.process_time()
    return {"ticks": began}

serve({"load": load, "generate": generate, "verify": verify, "ticks": ticks, "streams": streams, "limits": limits})
"""
SETTINGS = compare.PeerSettings("model", None, "bfloat16", 1, 64, "scratch", 3, (8, 4), 6)
ASKED = (Question(("the end",), "a"), Question(("and", "then"), "b"))


@pytest.fixture
def script(tmp_path) -> str:
    file = tmp_path / "peer_fake.py"
    file.write_text(FAKE)
    shutil.copy(PEERS_FOLDER / "serve.py", tmp_path)
    return str(file)


def one(script: str, program: str = FOREDRAFT, *modes: str, **job) -> Participant:
    return Participant(program, script, Path(sys.executable), modes or ("plain",), "bfloat16", "bfloat16", job)


def run(*parts: Participant, asked=ASKED, rows=(), streams=None) -> compare.Comparison:
    settings = replace(SETTINGS, streams=streams or StreamsPlan())
    comparison = compare.Comparison.from_participants(parts, settings, lambda title: None)
    comparison.run(asked, tiny_models.tokenizer(), rows, 8)
    return comparison


def test_a_resident_answers_job_after_job(script):
    with SubprocessPeer(Path(sys.executable), script, 7) as peer:
        assert peer.call("load", 20, threads=7) == {"version": "fake 77"}
        for prompt in ([1], [5]):
            assert peer.call("generate", 20, mode="plain", prompt=prompt, max_tokens=2)["tokens"][0] == prompt[0] + 1


def test_a_job_that_raises_is_one_line_and_the_next_is_answered(script):
    with SubprocessPeer(Path(sys.executable), script, 1) as peer:
        with pytest.raises(PeerError, match=r"^RuntimeError: no such weights$"):
            peer.call("load", 20, threads=1, fault="load")
        with pytest.raises(PeerError, match="KeyError"):
            peer.call("nonsense", 20)
        assert peer.call("load", 20, threads=1)


def test_a_process_that_ends_leaves_its_last_line(script, tmp_path):
    with SubprocessPeer(Path(sys.executable), script, 1) as peer:
        peer.call("load", 20, threads=1)
        with pytest.raises(PeerError, match=r"^KilledError: gone$"):
            peer.call("generate", 20, mode="dies", prompt=[1], max_tokens=1)
        with pytest.raises(PeerError, match="KilledError"):
            peer.call("load", 20, threads=1)
    with (
        SubprocessPeer(Path(sys.executable), str(tmp_path / "none.py"), 1) as peer,
        pytest.raises(PeerError, match="No such file or directory"),
    ):
        peer.call("load", 20)


def test_a_program_that_cannot_be_run_is_one_line(tmp_path):
    with pytest.raises(PeerError, match="cannot be run: Permission denied"):
        SubprocessPeer(tmp_path, "serve.py", 1)


def test_a_job_that_takes_too_long_ends_its_process(script):
    with SubprocessPeer(Path(sys.executable), script, 1) as peer:
        peer.call("load", 20, threads=1)
        with pytest.raises(PeerError, match="no answer to 'generate' within 0 s"):
            peer.call("generate", 0.2, mode="hangs", prompt=[1], max_tokens=1)
        began = time.monotonic()
        with pytest.raises(PeerError):
            peer.call("load", 20, threads=1)
        assert time.monotonic() - began < 15


def test_between_jobs_the_process_is_stopped(script):
    with SubprocessPeer(Path(sys.executable), script, 1) as peer:
        peer.call("load", 20, threads=1)
        state = Path(f"/proc/{peer._process.pid}/stat")
        if not state.exists():
            pytest.skip("no /proc here")
        for _ in range(100):  # the signal takes effect a moment later
            if state.read_text().rpartition(")")[2].split()[0] == "T":
                break
            time.sleep(0.01)
        else:
            pytest.fail("the process still runs")


def test_the_figures_of_a_comparison(script):
    comparison = run(one(script), one(script, "peer", "plain", "other", pace=0.5), rows=[1, 4])
    ours, same, other = comparison.build_rows()
    assert [r.status for r in (ours, same, other)] == ["ok"] * 3
    assert (ours.over_ours, same.over_ours) == (1.0, 2.0)
    assert (ours.tokens_per_second, same.tokens_per_second) == (1.0, 2.0)
    assert (ours.identical, same.identical, other.identical, ours.prompts) == (3, 3, 0, 3)
    assert ours.acceptance_length == 2.0
    assert comparison.versions == {FOREDRAFT: "fake 11", "peer": "fake 11"}
    assert [(c.rows, c.ratio) for c in comparison.costs["peer (bfloat16)"]] == [(1, 1.0), (4, 2.5)]


def test_limits_are_measured_between_the_prompts_and_stand_below_the_passes(script):
    ours = replace(one(script), has_limits_op=True)
    comparison = run(ours, one(script, "peer"), rows=[1, 4])
    found = comparison.limits
    assert list(found) == [f"{FOREDRAFT} (bfloat16)"]
    assert [limit.gigabytes_per_second for limit in found[f"{FOREDRAFT} (bfloat16)"]] == [1.0, 2.0, 3.0, 4.0]
    medians = {label: find_median_limits(limits) for label, limits in found.items()}
    table = compare_report.build_limit_table(medians, comparison.build_rows())
    assert table.rows == ((f"{FOREDRAFT} (bfloat16)", "1000", "2.5", "25", "2.5", "1.0", "40 %"),)
    names = [row[0] for row in compare_report.build_cost_table(comparison.costs, medians, 0).rows]
    assert names == [f"{FOREDRAFT} (bfloat16)", f"limit of {FOREDRAFT} (bfloat16)", "peer (bfloat16)"]


def test_a_target_without_limits_has_no_row_of_them(script):
    comparison = run(replace(one(script, fault="limits"), has_limits_op=True), rows=[1])
    assert not comparison.limits
    assert [row.status for row in comparison.build_rows()] == ["ok"]


def test_plain_decoding_by_streams_is_paired_with_that_of_the_same_weights(script):
    peer = replace(one(script, "peer", "plain", "other", pace=0.5), weights="Q8_0")
    broken = one(script, "broken", fault="streams")
    alone = replace(one(script, "alone"), group="int8")
    comparison = run(
        one(script), peer, broken, alone, asked=(), streams=StreamsPlan((2, 5), prompt_tokens=4, rounds=2)
    )  # fmt: skip
    # 6 output tokens per stream; the fake needs a second per prompt token, at its pace
    expected = [
        StreamSpeed(program, weights, count, count * 6 / (4 * pace), ours)
        for count in (2, 5)
        for program, weights, pace, ours in (
            (FOREDRAFT, "bfloat16", 1.0, 1.0), ("peer", "Q8_0", 0.5, 0.5), ("alone", "bfloat16", 1.0, None)
        )
    ]  # fmt: skip
    assert comparison.stream_speeds == expected
    assert comparison.stream_failures == {"broken plain (bfloat16)": "RuntimeError: no memory"}
    table = compare_report.build_streams_table(comparison.stream_speeds, {}, StreamsPlan(), 6)
    assert table.rows[1] == ("peer", "Q8_0", "6.0 (0.50x)", "15.0 (0.50x)")


def test_the_limit_of_several_streams_stands_below_their_row(script):
    ours, plan = replace(one(script), has_limits_op=True), StreamsPlan((2,), prompt_tokens=4, rounds=2)
    comparison = run(ours, one(script, "peer"), asked=(), streams=plan)
    medians = {label: find_median_limits(limits) for label, limits in comparison.limits.items()}
    assert [limit.gigabytes_per_second for limit in comparison.limits[f"{FOREDRAFT} (bfloat16)"]] == [1.0, 2.0]
    table = compare_report.build_streams_table(comparison.stream_speeds, medians, plan, 6)
    # 15 GFLOP/s: 8 tokens of prompts take 8/15 s by arithmetic, and reading 1 GB at 1.5 GB/s 2/3 s; so do 5 passes more
    assert table.rows[1] == (f"limit of {FOREDRAFT}", "bfloat16", "3.0 (100 %)")
    assert [row[0] for row in table.rows] == [FOREDRAFT, f"limit of {FOREDRAFT}", "peer"]


def test_a_program_that_counts_no_passes_has_no_acceptance_length(script):
    (row,) = run(one(script, "peer", "uncounted")).build_rows()
    assert (row.status, row.acceptance_length) == ("ok", None)


def test_a_failed_or_absent_peer_is_a_row_and_the_rest_goes_on(script):
    gone = replace(one(script, "gone"), python=None)
    missing = replace(one(script, "missing"), python=Path("/nowhere/python"))
    rows = run(
        one(script), gone, missing, one(script, "unloaded", fault="load"), one(script, "crashed", fault="crash"),
        one(script, "half", "raises", "plain"), one(script, "dead", "dies", "plain"),
    ).build_rows()  # fmt: skip
    found = {(r.program, r.mode): (r.status, r.reason) for r in rows}
    assert found[FOREDRAFT, "plain"] == ("ok", "")
    assert found["gone", "plain"] == ("absent", "not given")
    assert found["missing", "plain"] == ("absent", "/nowhere/python does not exist")
    assert found["unloaded", "plain"] == ("failed", "RuntimeError: no such weights")
    assert found["crashed", "plain"] == ("failed", "ImportError: nothing here")
    assert found["half", "raises"] == ("failed", "ValueError: cannot")
    assert found["half", "plain"] == ("ok", "")
    assert found["dead", "plain"] == ("failed", "KilledError: gone")
    table = compare_report.build_result_table(rows).markdown
    assert "absent: not given" in table
    assert "failed: KilledError: gone" in table


def test_without_us_the_others_are_still_measured(script):
    rows = run(one(script, FOREDRAFT, fault="load"), one(script, "peer")).build_rows()
    assert (rows[1].status, rows[1].tokens_per_second, rows[1].over_ours, rows[1].identical) == ("ok", 1.0, None, None)
    assert compare_report.compute_leads(rows) == []


def test_questions_beyond_the_context_are_named(script):
    comparison = run(one(script), asked=(ASKED[0], Question(("the end " * 60,), "long")))
    assert comparison.too_long == ["long"]
    assert comparison.build_rows()[0].prompts == 1


def test_the_lead_is_plain_over_plain_and_best_over_best():
    def row(program, mode, speed, weights="bfloat16", group="bfloat16"):
        return compare.ComparisonRow(program, mode, weights, group, "ok", "", "", tokens_per_second=speed)

    rows = [
        row(FOREDRAFT, "plain", 10.0), row(FOREDRAFT, "ngram", 30.0), row("peer", "plain", 8.0),
        row("peer", "lookup", 12.0),
        row("slow", "other", 5.0), row(FOREDRAFT, "plain", 20.0, "int8", "int8"),
        row("peer", "plain", 16.0, "Q8_0", "int8"),
    ]  # fmt: skip
    found = [
        (x.program, x.weights, x.plain, x.best, x.our_best, x.its_best) for x in compare_report.compute_leads(rows)
    ]
    assert found == [
        ("peer", "bfloat16", 1.25, 2.5, "ngram", "lookup"),
        ("slow", "bfloat16", None, 6.0, "ngram", "other"),
        ("peer", "int8", 1.25, 1.25, "plain", "plain"),
    ]


def test_who_takes_part():
    pythons = PeerPythons(Path("ours"), Path("hf"), Path("llama"), None)
    methods = [BenchMethod("ngram:8", {"method": "ngram", "num_speculative_tokens": 8})]
    parts = list(iter_participants(pythons, methods, "bfloat16", ["int4"], {"fused": False}))
    ours, quantized = (p for p in parts if p.program == FOREDRAFT)
    assert ours.modes == ("plain", "ngram:8")
    assert ours.load_arguments["settings"] == {"fused": False}
    assert quantized.load_arguments["settings"] == {"fused": False, "quantization": "int4"}
    assert [(p.weights, p.group, p.modes) for p in parts if p.program == "llama.cpp"] == [
        ("bfloat16", "bfloat16", ("plain", "prompt_lookup", "draft")),
        ("Q4_0", "int4", ("plain",)),
    ]
    assert [p.modes for p in parts if p.program == "vllm"] == [("plain",), ("ngram",), ("draft",)]
    assert all((PEERS_FOLDER / p.script).exists() for p in parts)


def test_the_folder_of_an_environment_stands_for_its_python(tmp_path):
    assert replace(one("x"), python=tmp_path).python_path == tmp_path / "bin" / "python"


def test_residents_have_their_own_scripts():
    assert {p.name for p in subprocess_peer.PEERS_FOLDER.glob("peer_*.py")} == {
        "peer_foredraft.py", "peer_llama_cpp.py", "peer_transformers.py", "peer_vllm.py",
    }  # fmt: skip


def test_timed_passes_may_need_more_memory_than_prompts() -> None:
    assert choose_length(40_960, 256, ()) == MAX_CONTEXT
    assert choose_length(40_960, 256, (1, 8)) == MAX_CONTEXT
    assert choose_length(40_960, 32_768, (1, 8, 64)) == 32_832
    assert choose_length(256, 128, (8,)) == 256
    with pytest.raises(ForedraftError, match="--context 32768 does not fit the 32800 tokens"):
        choose_length(32_800, 32_768, (1, 64))
