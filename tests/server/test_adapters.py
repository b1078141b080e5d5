"""LoRA adapters of a server: models in the engine of their base, chosen by name, counted apart, loaded and unloaded."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from foredraft import LLM, ForedraftError, RequestOptions, Sampling
from foredraft.server.adapter_service import AdapterLoader
from foredraft.server.admin import AdminRoutes, LoadModelRequest
from foredraft.server.kv_shares import KVShare
from foredraft.server.model_host import ModelHost, ModelSource
from foredraft.server.settings import ServerSettings
from tests.support import tiny_models
from tests.support.lora_folders import write_adapter
from tests.support.server.live_server import PLAIN_HTTP, RunningServer, run_models

KEY = "adm-canary-91ee-key"
SETTINGS = ServerSettings(admin_key=KEY, drain_timeout=30)
PROMPT, SAMPLING = "the end", Sampling(temperature=0, max_tokens=12, ignore_eos=True)
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


def make_target():
    return tiny_models.llama(len(tiny_models.tokenizer()), seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, make_target(), seed=seed) for seed, name in enumerate(("x", "y"), 1)}


@pytest.fixture(scope="module")
def expected(folders) -> dict[str, str]:
    """Texts by name of the model."""
    llm = LLM(make_target(), None, tokenizer=tiny_models.tokenizer(), adapters=folders)
    options = {"base": RequestOptions()} | {name: RequestOptions(adapter=name) for name in folders}
    return {name: llm.generate(PROMPT, SAMPLING, options=option)[0].text for name, option in options.items()}


def make_adapter_source(name: str, folder: Path | str) -> ModelSource:
    settings = replace(SETTINGS, model_names=(name,))
    return ModelSource(settings, AdapterLoader(name, str(folder)).load, base_name="base", shares_engine=True)


@pytest.fixture
def server(folders) -> Iterator[RunningServer]:
    def load(share: KVShare, base: LLM | None) -> LLM:
        return LLM(make_target(), "ngram", tokenizer=tiny_models.tokenizer(), num_speculative_tokens=3)

    def build(request: LoadModelRequest) -> ModelSource:
        return make_adapter_source(request.name, request.lora or "")

    base = ModelSource(replace(SETTINGS, model_names=("base",)), load)
    host = ModelHost(SETTINGS, [base, make_adapter_source("x", folders["x"])], kv_total=None)
    host.load_first()
    with run_models(host.models, AdminRoutes(host, build)) as running:
        yield running


def read_text(server: RunningServer, name: str) -> str:
    answer = server.post("/v1/completions", BODY | {"model": name})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return answer.json()["choices"][0]["text"]


def call_admin(server: RunningServer, method: str, path: str = "", body=None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.request(method, server.url + "/admin/models" + path, json=body, headers=headers, **PLAIN_HTTP)


def count_tokens(server: RunningServer, name: str, metric: str = "generation_tokens_total") -> float:
    lines = server.get("/metrics").text.splitlines()
    [line] = [x for x in lines if x.startswith(f"foredraft:{metric}{{") and f'model_name="{name}"' in x]
    return float(line.split()[-1])


def test_the_name_of_a_model_chooses_the_adapter_and_requests_run_together(server, expected):
    assert len(set(expected.values())) == 3
    with ThreadPoolExecutor(6) as pool:
        names = ["base", "x"] * 3
        assert list(pool.map(lambda name: read_text(server, name), names)) == [expected[name] for name in names]
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {"base": None, "x": "base"}


def test_all_adapters_share_one_engine(server):
    services = {service.settings.model_names[0]: service for service in server.server.models.services}
    assert services["x"].worker is services["base"].worker
    assert services["x"].llm is services["base"].llm


def test_tokens_are_counted_by_adapter(server):
    before = {name: count_tokens(server, name) for name in ("base", "x")}
    read_text(server, "x")
    assert {name: count_tokens(server, name) - before[name] for name in before} == {"base": 0, "x": 12}
    read_text(server, "base")
    assert {name: count_tokens(server, name) - before[name] for name in before} == {"base": 12, "x": 12}
    assert count_tokens(server, "x", "prompt_tokens_total") == count_tokens(server, "base", "prompt_tokens_total") > 0


def test_adapters_are_loaded_and_unloaded_while_requests_run(server, folders, expected):
    body = {"name": "y", "lora": str(folders["y"])}
    assert call_admin(server, "POST", body=body).status_code == 200
    assert read_text(server, "y") == expected["y"]
    refused = call_admin(server, "DELETE", "/base")
    assert refused.status_code == 409
    assert "adapters run in this model's engine; unload them first: x, y" in refused.text
    assert call_admin(server, "DELETE", "/x").status_code == 200
    assert server.post("/v1/completions", BODY | {"model": "x"}).status_code == 404
    assert (read_text(server, "base"), read_text(server, "y")) == (expected["base"], expected["y"])
    assert call_admin(server, "POST", body={"name": "x", "lora": str(folders["x"])}).status_code == 200
    assert read_text(server, "x") == expected["x"]


def test_an_adapter_that_does_not_fit_is_refused_and_the_server_goes_on(server, tmp_path, expected):
    other = write_adapter(tmp_path, tiny_models.llama(hidden=64))
    answer = call_admin(server, "POST", body={"name": "z", "lora": str(other)})
    assert answer.status_code == 400
    assert "does not fit" in answer.text
    assert "merge it into a model of its own, with a weight" in answer.text
    assert str(other) not in answer.text
    assert server.post("/v1/completions", BODY | {"model": "z"}).status_code == 404
    assert read_text(server, "x") == expected["x"]


def test_a_base_that_is_missing_is_an_error_of_the_caller(folders):
    with pytest.raises(AssertionError, match="after its base"):
        AdapterLoader("x", str(folders["x"])).load(KVShare(), None)
    llm = LLM(make_target(), None, tokenizer=tiny_models.tokenizer())
    with pytest.raises(ForedraftError, match=r"is no folder.*weight=1"):
        AdapterLoader("x", "/nowhere").load(KVShare(), llm)
