"""Images in chat requests: data URLs and files of one folder are read, everything else is refused with status 400."""

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from foredraft import LLM, Sampling
from foredraft.server.settings import BODY_BYTES, ServerSettings, make_request_limits
from tests.support.server.live_server import RunningServer, run_server
from tests.support.tiny_vision import make_image, save_vision_model

NAME = "vision"
TEXT = "what is in the picture"


def encode_file(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def write_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


URLS = [write_url(encode_file(make_image(seed))) for seed in range(3)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("llava")
    save_vision_model("llava", folder)
    with LLM(str(folder), "ngram", max_images=2, num_speculative_tokens=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("root")
    (root / "media" / "sub dir").mkdir(parents=True)
    make_image(1).save(root / "media" / "sub dir" / "one.png")
    make_image(1).save(root / "outside.png")
    (root / "media" / "link.png").symlink_to(root / "outside.png")
    return root / "media"


@pytest.fixture(scope="module")
def server(llm: LLM, media: Path) -> Iterator[RunningServer]:
    settings = ServerSettings(model_names=(NAME,), media_folder=str(media), limits=make_request_limits(2))
    with run_server(llm.with_drafter("ngram", 3), settings) as server:
        yield server


def build_body(*urls: str, **more: Any) -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | more


def post(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


def answer(server: RunningServer, *urls: str) -> str:
    response = post(server, build_body(*urls))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def answer_in_process(llm: LLM, *images: Any) -> str:
    parts = [{"type": "image", "image": image} for image in images]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]
    return llm.chat(messages, Sampling(temperature=0, max_tokens=8, ignore_eos=True))[0].text


def test_the_answer_is_that_of_the_library(server: RunningServer, llm: LLM) -> None:
    plain = llm.with_drafter(None)
    texts = [answer(server, URLS[0]), answer(server, URLS[1]), answer(server, URLS[0], URLS[1])]
    images = [[make_image(0)], [make_image(1)], [make_image(0), make_image(1)]]
    assert texts == [answer_in_process(plain, *each) for each in images]
    assert len(set(texts)) == 3


def test_a_stream_and_the_usage_count_the_tokens_of_images(server: RunningServer) -> None:
    bare = post(server, build_body()).json()["usage"]["prompt_tokens"]
    assert post(server, build_body(URLS[0])).json()["usage"]["prompt_tokens"] == bare + 4
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=build_body(URLS[0], stream=True), timeout=60
    ) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == answer(server, URLS[0])


def test_an_equal_image_finds_its_pages_and_another_does_not(server: RunningServer) -> None:
    def count_hits(url: str) -> int:
        body = build_body(url)
        body["messages"][0]["content"].append({"type": "text", "text": "red green blue " * 16})
        scheduler = server.service.llm.engine.scheduler
        before = scheduler.prefix_hits
        assert post(server, body).status_code == 200
        return scheduler.prefix_hits - before

    fresh = write_url(encode_file(make_image(11)))
    assert count_hits(fresh) == 0
    assert count_hits(fresh) > 16
    assert count_hits(write_url(encode_file(make_image(12)))) == 0


def test_a_file_of_the_media_folder_is_read(server: RunningServer, media: Path) -> None:
    assert answer(server, f"file://{media}/sub%20dir/one.png") == answer(server, URLS[1])


def make_bomb() -> bytes:
    """Write a small file that unpacks to more pixels than an image may have."""
    return encode_file(Image.new("1", (12000, 12000)))


REFUSED = {
    "http": ("http://example.com/cat.png", "not fetched.*data:image"),
    "https": ("https://127.0.0.1:9/cat.png", "not fetched"),
    "ftp": ("ftp://example.com/cat.png", "not fetched"),
    "no URL": ("cat.png", "not fetched"),
    "no base64": ("data:image/png;base64,@@@@", "no valid base64"),
    "no image": ("data:text/html;base64,AAAA", "data:image"),
    "damaged": (write_url(encode_file(make_image())[:200]), "cannot be read"),
    "format": (write_url(encode_file(make_image(), "TIFF"), "tiff"), "none of the formats PNG"),
    "text": (write_url(b"GET / HTTP/1.1"), "none of the formats"),
    "bomb": (write_url(make_bomb()), "12000 x 12000 pixels"),
    "empty": ("data:image/png;base64,", "none of the formats"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_images_are_refused(server: RunningServer, name: str) -> None:
    url, message = REFUSED[name]
    response = post(server, build_body(url))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages"
    assert re.search(message, error["message"]), error


@pytest.mark.parametrize(
    "path",
    [
        "/../outside.png",
        "/%2e%2e/outside.png",
        "/link.png",
        "/missing.png",
        "/sub%20dir",
        "",
        "/a%00b.png",
        "/" + "a" * 5000,
    ],
)
def test_files_outside_of_the_media_folder_are_refused(server: RunningServer, media: Path, path: str) -> None:
    response = post(server, build_body(f"file://{media}{path}"))
    assert response.status_code == 400
    assert "media folder" in response.json()["error"]["message"]


def test_too_many_images_and_bytes_are_refused(server: RunningServer) -> None:
    response = post(server, build_body(*URLS))
    assert response.status_code == 400
    assert "at most 2" in response.json()["error"]["message"]
    response = post(server, build_body(write_url(bytes(21 << 20))))
    assert response.status_code == 400
    assert "shrink it" in response.json()["error"]["message"]
    assert make_request_limits(0).max_body_bytes == BODY_BYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"truncate_prompt_tokens": 4}, "truncated"),
        ({"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": URLS[0]}}]}]}, "user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": URLS[0]}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "sounds"),
    ],
)
def test_wrong_requests_are_refused(server: RunningServer, change: dict[str, Any], message: str) -> None:
    response = post(server, build_body(URLS[0]) | change)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_text_that_spells_a_placeholder_is_text(server: RunningServer) -> None:
    body = build_body(URLS[0])
    body["messages"][0]["content"][1]["text"] = "what is <image> this"
    response = post(server, body)
    assert "placeholders" not in response.text


def test_a_server_without_images_refuses_them(llm: LLM) -> None:
    with run_server() as server:
        response = post(server, build_body(URLS[0]))
    assert response.status_code == 400
    assert "--max-images" in response.json()["error"]["message"]


def test_a_server_without_a_media_folder_reads_no_file(llm: LLM, media: Path) -> None:
    settings = ServerSettings(model_names=(NAME,), limits=make_request_limits(2))
    with run_server(llm.with_drafter(None), settings) as server:
        response = post(server, build_body(f"file://{media}/sub%20dir/one.png"))
    assert response.status_code == 400
    assert "--allowed-local-media-path" in response.json()["error"]["message"]
