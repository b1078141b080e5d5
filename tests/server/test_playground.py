"""The page at `/`: what is sent, and what a browser makes of it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

pytest.importorskip("fastapi", reason="pip install foredraft[serve]")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from foredraft import LLM
from foredraft.server.app import create_app
from foredraft.server.playground import CONTENT_TYPES, STATIC_FOLDER, make_playground_router
from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings
from tests.support.server.browser_pages import open_page, run, serve_app, styles, wait_until
from tests.support.server.playground_fakes import EVIL

FILES = sorted(path for path in STATIC_FOLDER.iterdir() if path.suffix in CONTENT_TYPES)


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    app.include_router(make_playground_router())
    return TestClient(app)


@pytest.mark.parametrize("path", ["/", *(f"/static/{file.name}" for file in FILES)])
def test_every_file_is_sent_with_headers_that_bind_the_page(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.head(path).headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("name", ["nothing.js", "..%2fplayground.py", "%2e%2e/playground.py", "."])
def test_nothing_else_is_sent(client, name):
    assert client.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_hold_nothing_from_elsewhere_and_nothing_inline(file):
    text = file.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}  # the XML name of SVG, not an address
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert word not in text
    if file.suffix == ".html":
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)


def test_every_file_that_is_named_exists():
    names = {name for file in FILES for name in re.findall(r'"(?:static|\.)/([\w.]+)"', file.read_text("utf-8"))}
    assert len(names) > 5
    assert names <= {file.name for file in FILES}


# -- in a browser --


def test_tokens_stream_in_the_colours_of_their_origins(page):
    run(page, "origins")
    assert page.inner_text("#output") == "def mean(values):\n    return sum(x"
    looks = {
        kind: styles(page, f"#output .t.{kind}", "backgroundColor", "borderBottomStyle", "borderBottomColor")
        for kind in ("accepted", "corrected", "bonus", "none")
    }
    assert len({background for background, _, _ in looks.values()}) == 4
    assert len({style for _, style, _ in list(looks.values())[:3]}) == 3  # not by colour alone
    shares = [page.inner_text(f"[data-count={origin}]") for origin in ("accepted", "corrected", "bonus", "plain")]
    assert shares == ["5 · 50 %", "3 · 30 %", "1 · 10 %", "1 · 10 %"]
    assert [page.inner_text(f"[data-figure={name}]") for name in ("tokens", "passes", "length")] == ["10", "5", "2.00"]


def test_origins_differ_in_the_dark_too_and_text_keeps_its_contrast(browser, served, fake):
    with open_page(browser, served[1], color_scheme="dark") as page:
        run(page, "origins")
        for kind in ("accepted", "corrected", "bonus"):
            ink, paper = styles(page, f"#output .t.{kind}", "color", "backgroundColor")
            assert contrast(ink, paper) > 7


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours as the browser names them, rgb(r, g, b)."""

    def light(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_token_shows_the_drafts_rejected_in_its_pass(page):
    run(page, "origins")
    page.hover("#output .t.corrected >> nth=0")
    assert page.is_visible("#card")
    assert page.locator("#card s").all_inner_texts() == ["·->", "·int"]
    assert styles(page, "#card s", "textDecorationLine") == ("line-through",)
    assert "Pass 3 · depth 2 · chosen by the target" in page.inner_text("#card")
    assert page.inner_text("#tree-title") == "Pass 3"
    page.hover("#output .t.accepted >> nth=2")
    assert "depth 1 · proposed by ngram" in page.inner_text("#card")
    page.hover("h1")
    assert page.is_hidden("#card")
    assert page.inner_text("#tree-title") == "Last pass (5)"


def test_keys_walk_through_tokens_and_passes(page):
    run(page, "origins")
    page.focus("#output")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    wait_until(lambda: page.text_content("#output .here") == " mean", "the next pass")
    page.keyboard.press("End")
    wait_until(lambda: page.text_content("#output .here") == "x", "the last token")
    assert "rejected:  None,  0" in page.text_content("#spoken")
    page.keyboard.press("ArrowUp")
    wait_until(lambda: page.text_content("#output .here") == "    return", "the pass before")
    page.keyboard.press("Escape")
    assert page.is_hidden("#card")


def test_the_tree_of_the_last_pass_is_drawn(page):
    run(page, "origins")
    nodes = page.locator("#tree .node")
    kinds = [nodes.nth(i).get_attribute("class").removeprefix("node ") for i in range(nodes.count())]
    assert sorted(kinds) == ["accepted", "accepted", "corrected", *["rejected"] * 6, "root"]
    assert page.locator("#tree .edge").count() == 9
    assert page.locator("#tree .rejected .strike").count() == 6
    kept = [
        page.get_attribute(f"#tree .node.{kind} >> nth=0", "transform") for kind in ("root", "accepted", "corrected")
    ]
    assert len({place.split()[1] for place in kept}) == 1, "the kept path runs straight"


@pytest.mark.parametrize("width", [360, 1000])
def test_the_page_fits_its_window_and_every_control_has_a_name(page, width):
    page.set_viewport_size({"width": width, "height": 760})
    page.check("#compare")
    run(page, "origins")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    heights = page.eval_on_selector("#verdict", "e => [e.scrollHeight, e.clientHeight]")
    assert heights[0] <= heights[1], "the verdict runs into what is below"
    controls = page.locator("input, select, textarea, button, [tabindex]")
    for name in controls.evaluate_all(
        "all => all.map(e => e.labels?.[0]?.textContent || e.ariaLabel || e.textContent)"
    ):
        assert name.strip()


def test_charts_have_axes_and_lines(page):
    run(page, "long 300")
    for chart in ("#length-chart", "#rate-chart"):
        assert len(page.get_attribute(f"{chart} .line.main", "d")) > 50
        labels = page.locator(f"{chart} .axes text").all_text_contents()
        assert labels[0].strip("0.") == ""
        assert labels[-1].endswith(" s")


def test_thousands_of_tokens_are_appended_and_nothing_moves(page):
    page.fill("#prompt", "long 2500")
    page.click("#run")
    page.wait_for_selector("#output .t >> nth=5")
    page.evaluate("window.first = document.querySelector('#output .t')")
    before = page.locator("#output").bounding_box(), page.locator("#tree").bounding_box()
    page.wait_for_selector("body:not(.busy)")
    assert page.locator("#output .t").count() == 7500
    assert page.evaluate("window.first === document.querySelector('#output .t')"), "drawn again"
    assert (page.locator("#output").bounding_box(), page.locator("#tree").bounding_box()) == before
    assert page.evaluate("(o => o.scrollHeight - o.scrollTop - o.clientHeight < 30)(document.querySelector('#output'))")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping_ends_the_request_on_the_server(page, fake, how):
    page.fill("#prompt", "endless")
    page.click("#run")
    page.wait_for_selector("#output .t >> nth=10")
    assert fake.running == 1
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    page.wait_for_selector("body:not(.busy)")
    wait_until(lambda: fake.running == 0, "the request runs on")
    assert page.inner_text("#status").startswith("Stopped after ")
    assert page.is_enabled("#run")
    assert page.is_disabled("#stop")


def test_side_by_side_runs_the_request_again_without_drafts(page, fake):
    page.check("#compare")
    run(page, "origins", seed="3", top_k="5")
    first, second = fake.bodies
    assert second == {**first, "speculative": {"num_speculative_tokens": 0}}
    assert (first["seed"], first["top_k"], first["stream"], first["foredraft_trace"]) == (3, 5, True, True)
    assert "top_p" not in first  # left empty: the server's own
    assert page.inner_text("#plain-output") == page.inner_text("#output")
    assert page.inner_text("#verdict").endswith("the texts are identical.")
    assert page.inner_text("[data-plain=passes]") == "plain 10"


def test_fields_become_the_request(page, fake):
    page.select_option("#draft", "4")
    page.check("input[value=chat]", force=True)
    run(page, "origins", seed="", temperature="0", top_p="0.9")
    [body] = fake.bodies
    assert body["messages"] == [{"role": "user", "content": "origins"}]
    assert body["speculative"] == {"num_speculative_tokens": 4}
    assert (body["model"], body["temperature"], body["top_p"]) == ("fake-model", 0, 0.9)
    assert "prompt" not in body
    assert "seed" not in body


def test_errors_are_one_line(page):
    run(page, "origins", max_tokens="0")
    assert page.inner_text("#error") == "max_tokens must be at least 1, got 0"
    run(page, "broken", max_tokens="9")
    assert page.inner_text("#error") == "the model returned invalid logits"
    assert page.inner_text("#output") == "so far"
    run(page, "origins")
    assert page.inner_text("#error") == ""


def test_a_server_without_traces_still_shows_text(page):
    run(page, "untraced")
    assert page.inner_text("#output") == "no trace"


def test_a_missing_key_is_asked_for_and_kept_for_the_tab_alone(browser, served, fake):
    fake.key = "secret"
    with open_page(browser, served[1]) as page:
        page.wait_for_selector("#key-field:not([hidden])")
        assert "API key" in page.inner_text("#error")
        run(page, "origins", key="secret")
        assert page.inner_text("[data-figure=tokens]") == "10"
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert page.inner_text("#model") == "fake-model · drafter ngram"


def test_what_the_model_says_is_only_text(page):
    run(page, "evil")
    page.hover("#output .t.accepted")
    assert page.inner_text("#output") == EVIL * 3
    assert page.locator("#output img, #card img, #tree img, #output script, #card script, #tree script").count() == 0
    assert page.title() == "Foredraft playground"
    page.fill("#prompt", EVIL)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("body:not(.busy)")
    assert page.title() == "Foredraft playground"


# -- against the server itself --


@pytest.fixture(scope="module")
def llm():
    return LLM()


@contextmanager
def serve(llm: LLM, api_key: str | None = None) -> Iterator[str]:
    service = Service(ServerSettings(model_names=("builtin",), api_key=api_key))
    service.open(llm)
    with serve_app(create_app(ServedModels.single(service))) as url:
        yield url


@pytest.fixture(scope="module")
def real(llm):
    with serve(llm) as url:
        yield url


def artefacts() -> Path:
    folder = Path(os.environ.get("FOREDRAFT_ARTEFACTS") or Path(__file__).parents[1] / "artefacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_server_streams_to_the_page_and_plain_decoding_says_the_same(browser, real, scheme):
    with open_page(browser, real, color_scheme=scheme) as page:
        page.check("#compare")
        page.fill("#max_tokens", "160")
        page.select_option("#draft", "2")  # auto may find on a busy machine that drafting does not pay
        page.click("#run")
        page.wait_for_selector("body:not(.busy)")
        assert page.inner_text("#error") == ""
        assert page.inner_text("#verdict").endswith("the texts are identical.")
        assert page.inner_text("#output") == page.inner_text("#plain-output") != ""
        assert page.locator("#output .accepted").count() > 20
        assert page.locator("#output .corrected").count() > 5
        assert page.locator("#plain-output .t:not(.none)").count() == 0
        page.evaluate("document.querySelector('#output').scrollTop = 0")
        assert "proposed by draft_model" in hover(page, "#output .t.accepted:text-matches('[a-z]') >> nth=8")
        hover(page, "#output .t.corrected:text-matches('[a-z]') >> nth=3")
        assert page.locator("#card s").count() > 0
        name = "playground.png" if scheme == "light" else "playground-dark.png"
        page.screenshot(path=artefacts() / name)


def hover(page, selector: str) -> str:
    page.hover(selector)
    return page.inner_text("#card")


def test_a_chat_streams_with_its_origins_too(browser, real):
    with open_page(browser, real) as page:
        page.check("input[value=chat]", force=True)
        page.select_option("#draft", "2")
        run(page, "What is a list?", max_tokens="24")
        assert page.inner_text("#error") == ""
        assert page.inner_text("[data-figure=tokens]") == "24"
        assert page.locator("#output .t:not(.none)").count() > 5


def test_the_stop_button_frees_the_request_of_the_server(browser, real):
    with open_page(browser, real) as page:
        page.fill("#max_tokens", "1000")
        page.fill("#temperature", "1.5")  # rarely ends by itself
        page.click("#run")
        page.wait_for_selector("#output .t >> nth=3")
        assert running(real) == 1
        page.click("#stop")
        page.wait_for_selector("body:not(.busy)")
        assert page.inner_text("#status").startswith("Stopped after ")
        wait_until(lambda: running(real) == 0, "the request runs on")


def running(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    [value] = re.findall(r"^foredraft:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_the_servers_own_words_reach_the_reader(browser, real):
    with open_page(browser, real) as page:
        run(page, "x", max_tokens="0")
        assert "max_tokens" in page.inner_text("#error")
        assert "\n" not in page.inner_text("#error")


def test_the_page_asks_for_the_key_of_the_server_and_goes_on(browser, llm):
    """Fault: without the key the page was a 401 that nothing followed."""
    with serve(llm.with_drafter("ngram"), "secret") as url, open_page(browser, url) as page:
        page.wait_for_selector("#key-field:not([hidden])")
        assert page.inner_text("#error") == "This server needs its API key."
        run(page, "import os", max_tokens="9", key="wrong")
        assert page.inner_text("#error") == "The server refused this API key; type it again."
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("body:not(.busy)")
        wait_until(lambda: page.inner_text("[data-figure=tokens]") == "9", "the request was not sent")
        assert page.inner_text("#error") == ""
        assert page.inner_text("[data-figure=tokens]") == "9"
        assert page.inner_text("#model") == "builtin · drafter ngram"
        assert page.is_hidden("#key-field")
