"""The metrics of all replicas on one page that Prometheus takes."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foredraft.replicas.front_metrics import FrontMetrics, add_label, join_pages
from foredraft.server.metrics import ServerMetrics
from foredraft.server.prometheus_text import MetricsPage


@pytest.mark.parametrize(
    ("line", "labelled"),
    [
        ("a:b 1", 'a:b{replica="r"} 1'),
        ('a{x="1"} 2.5e-3', 'a{replica="r",x="1"} 2.5e-3'),
        ('a{x="} {y",z="\\""} +Inf', 'a{replica="r",x="} {y",z="\\""} +Inf'),
        ("a{} 1 1700000000", 'a{replica="r"} 1 1700000000'),
    ],
)
def test_a_sample_gets_the_label(line: str, labelled: str):
    assert add_label(line, "r") == labelled


def test_what_is_no_sample_is_refused():
    with pytest.raises(ValueError, match="no sample"):
        add_label("<html>", "r")


def test_every_sample_of_every_replica_is_there_once_and_families_stay_in_one_piece():
    """Fault: pages one after the other repeat each family, which Prometheus refuses."""
    metrics = [ServerMetrics("m", True), ServerMetrics("m", True)]
    metrics[0].record_first_token(0.5)
    metrics[1].on_failure("nan")
    pages = {name: MetricsPage(lambda m=m: [m]).render().decode() for name, m in zip("ab", metrics, strict=True)}
    joined = join_pages(pages)
    families = list(text_string_to_metric_families(joined))
    assert len({family.name for family in families}) == len(families)
    for name, page in pages.items():
        expected = {
            (sample.name, *sorted(sample.labels.items()), sample.value)
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        found = set()
        for family in families:
            for sample in family.samples:
                if sample.labels["replica"] == name:
                    labels = {key: value for key, value in sample.labels.items() if key != "replica"}
                    found.add((sample.name, *sorted(labels.items()), sample.value))
        assert found == expected
    assert joined.count("# TYPE") == pages["a"].count("# TYPE")


def test_the_front_counts_its_choices():
    metrics = FrontMetrics()
    metrics.choices.update(["session", "load", "load"])
    metrics.broken["r1"] += 1
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render({"r1": 2, "r2": 0}))
        for sample in family.samples
    }
    assert samples["foredraft:replicas",] == 2
    assert samples["foredraft:front_requests_running", "r1"] == 2
    assert samples["foredraft:front_choices_total", "load"] == 2
    assert samples["foredraft:front_broken_total", "r1"] == 1
