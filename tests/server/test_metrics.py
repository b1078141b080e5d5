"""Metrics move, agree with the responses, have vLLM's names, and cannot fail a request."""

import json
import re
from pathlib import Path

import foredraft.server
from foredraft.server.histogram import Histogram
from foredraft.server.settings import ServerSettings
from tests.support.server.live_server import NAME, RunningServer, make_fresh_llm, run_server

BODY = {"prompt": "the end", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
DASHBOARD = Path(foredraft.server.__file__).parent / "grafana.json"
REQUEST = ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
           "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
           "request_time_per_output_token_seconds")  # fmt: skip


def read_idle_metrics(server: RunningServer) -> dict[str, float]:
    assert server.is_idle()
    return server.metrics()


def test_they_agree_with_usage():
    with run_server() as server:
        before = read_idle_metrics(server)
        answers = [server.complete(**BODY, speculative_metrics=True) for _ in range(3)]
        usage = [answer["usage"] for answer in answers]
        after = read_idle_metrics(server)
        for prefix in ("foredraft", "vllm"):
            moved = {name: after[name] - before.get(name, 0) for name in after if name.startswith(prefix)}
            assert moved[f"{prefix}:prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usage)
            assert moved[f"{prefix}:generation_tokens_total"] == sum(u["completion_tokens"] for u in usage)
            assert moved[f'{prefix}:request_success_total{{finished_reason="length"}}'] == 3
            for name in REQUEST:
                assert moved[f"{prefix}:{name}_count"] == 3, name
            assert moved[f"{prefix}:inter_token_latency_seconds_count"] > 0
            assert moved[f"{prefix}:prefix_cache_queries_total"] == sum(u["prompt_tokens"] for u in usage)
            cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usage)
            assert moved[f"{prefix}:prefix_cache_hits_total"] == cached
            assert after[f"{prefix}:num_requests_running"] == after[f"{prefix}:num_requests_waiting"] == 0
            spec = [a["metrics"]["speculative_decoding"] for a in answers]
            assert moved[f"{prefix}:spec_decode_num_drafts_total"] == sum(s["num_spec_steps"] for s in spec)
            assert moved[f"{prefix}:spec_decode_num_draft_tokens_total"] == sum(s["num_draft_tokens"] for s in spec)
            kept = moved[f"{prefix}:spec_decode_num_accepted_tokens_total"]
            assert 0 < kept <= sum(s["num_accepted_draft_tokens"] for s in spec) <= kept + 3
            by_depth = [
                v for n, v in moved.items() if n.startswith(f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total")
            ]
            assert sum(by_depth) == kept
            assert by_depth == sorted(by_depth, reverse=True)


def test_vllms_names_can_be_left_out():
    with run_server(make_fresh_llm(), ServerSettings(model_names=(NAME,), has_vllm_names=False)) as server:
        server.complete(**BODY)
        assert not [name for name in server.metrics() if name.startswith("vllm")]


def test_two_servers_in_one_process_count_apart(server: RunningServer):
    with run_server() as other:
        server.complete(**BODY)
        assert read_idle_metrics(other)["foredraft:prompt_tokens_total"] == 0


def test_a_broken_metric_fails_no_request():
    with run_server() as server:
        expected = server.complete(**BODY)["choices"]

        def broken(*_: object) -> None:
            raise RuntimeError("metrics")

        metrics = server.service.metrics
        metrics.on_step = metrics.on_finish = metrics.on_failure = broken  # type: ignore[method-assign]
        assert server.complete(**BODY)["choices"] == expected


def test_a_histogram():
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (9.0, 3)):
        histogram.observe(value, times)
    (family,) = [histogram.build_family("x", "y", {})]
    found = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert found == {"1.0": 3, "2.0": 4, "+Inf": 7, "x_count": 7, "x_sum": 31.0}


def test_every_expression_of_the_dashboard_names_a_metric(server: RunningServer):
    server.complete(**BODY)
    known = {line.split("{")[0].split(" ")[0] for line in server.get("/metrics").text.splitlines() if line[:1] != "#"}
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    named = [name for text in expressions for name in re.findall(r"\b(?:foredraft|vllm):\w+", text)]
    assert len(named) >= 20
    assert not set(named) - known
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
