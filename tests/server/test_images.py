"""Images in chat requests: data URLs and files of one folder are read, everything else is refused with status 400."""

import base64
import io
import json
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from foredraft import LLM, Sampling
from foredraft.server.preparation_threads import NUM_IMAGE_THREADS
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


def claim_size(width: int, height: int) -> bytes:
    """Write a small PNG file whose header claims another size."""
    data = encode_file(make_image())
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


REFUSED = {
    "http": ("http://example.com/cat.png", "not fetched.*data:image"),
    "https": ("https://127.0.0.1:9/cat.png", "not fetched"),
    "ftp": ("ftp://example.com/cat.png", "not fetched"),
    "no URL": ("cat.png", "not fetched"),
    "no base64": ("data:image/png;base64,@@@@", "base64 of an image is not valid.*encode the whole file again"),
    "no image": ("data:text/html;base64,AAAA", "data:image"),
    "damaged": (write_url(encode_file(make_image())[:200]), "cannot be read"),
    "format": (write_url(encode_file(make_image(), "TIFF"), "tiff"), "none of the formats PNG"),
    "text": (write_url(b"GET / HTTP/1.1"), "none of the formats"),
    "bomb": (write_url(make_bomb()), "12000 x 12000 pixels"),
    "larger bomb": (write_url(claim_size(2**31 - 1, 2**31 - 1)), "more pixels than.*shrink it"),
    "thin": (write_url(encode_file(Image.new("1", (3, 60000)))), "3 x 60000 pixels.*200 times the other; crop it"),
    "cut base64": (URLS[0][:-3], "base64 of an image is not valid"),
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


def test_images_do_not_hold_up_text(server: RunningServer) -> None:
    """Fault: images were read on the threads that tokenize the text of other requests."""
    image_threads, end = server.service.threads.images, threading.Event()
    for _ in range(NUM_IMAGE_THREADS):
        image_threads.submit(end.wait)
    statuses: list[int] = []
    client = threading.Thread(target=lambda: statuses.append(post(server, build_body(URLS[0])).status_code))
    client.start()
    try:
        assert post(server, build_body(max_tokens=1)).status_code == 200
        assert not statuses
    finally:
        end.set()
    client.join()
    assert statuses == [200]


def test_damaged_images_are_named_by_their_place(server: RunningServer) -> None:
    response = post(server, build_body(URLS[0], write_url(b"text")))
    assert response.json()["error"]["message"].startswith("image 2 of 2: ")


def test_tokenize_counts_the_tokens_of_images(server: RunningServer) -> None:
    body = build_body(URLS[0])
    counted = httpx.post(f"{server.url}/tokenize", json={"messages": body["messages"]}, timeout=60).json()
    assert counted["count"] == post(server, body).json()["usage"]["prompt_tokens"]


def test_tenants_do_not_share_the_pages_of_an_image(server: RunningServer) -> None:
    def count_hits(salt: str) -> int:
        body = build_body(write_url(encode_file(make_image(21))), cache_salt=salt)
        body["messages"][0]["content"].append({"type": "text", "text": "red green blue " * 16})
        return int(post(server, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [count_hits(salt) > 16 for salt in ("first", "first", "second", "second")] == [False, True, False, True]


def build_items(*parts: dict[str, Any], role: str = "user") -> dict[str, Any]:
    content = [*parts, {"type": "input_text", "text": TEXT}]
    return {"input": [{"role": role, "content": content}], "max_output_tokens": 8, "temperature": 0, "ignore_eos": True}


def post_items(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)


def read_output(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["output"][-1]["content"][0]["text"])


def test_responses_read_images_and_continue_with_them(server: RunningServer) -> None:
    part = {"type": "input_image", "image_url": URLS[1], "detail": "auto"}
    first = post_items(server, build_items(part))
    assert read_output(first) == answer(server, URLS[1])
    name = first.json()["id"]
    listed = httpx.get(f"{server.url}/v1/responses/{name}/input_items", timeout=60).json()["data"]
    assert listed[0]["content"] == [part, {"type": "input_text", "text": TEXT}]
    again = {"role": "user", "content": [{"type": "text", "text": "and this"}]}
    body = build_body(URLS[1])
    body["messages"] += [{"role": "assistant", "content": read_output(first)}, again]
    following = build_items() | {"input": "and this", "previous_response_id": name}
    assert read_output(post_items(server, following)) == post(server, body).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("part", "role", "message"),
    [
        ({"type": "input_image", "image_url": "http://x/a.png"}, "user", "not fetched"),
        ({"type": "input_image", "file_id": "file-1"}, "user", "stores no files"),
        ({"type": "input_image"}, "user", "image_url"),
        ({"type": "input_image", "image_url": URLS[0]}, "system", "messages of the user"),
        ({"type": "input_image", "image_url": URLS[0]}, "assistant", "messages of the user"),
        ({"type": "input_file"}, "user", "images as input_image"),
    ],
)
def test_responses_refuse_other_images(server: RunningServer, part: dict[str, Any], role: str, message: str) -> None:
    response = post_items(server, build_items(part, role=role))
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "input"


def test_an_image_in_the_result_of_a_call_is_refused(server: RunningServer) -> None:
    part = {"type": "input_image", "image_url": URLS[0]}
    body = build_items() | {"input": [{"type": "function_call_output", "call_id": "a", "output": [part]}]}
    assert "messages of the user" in post_items(server, body).json()["error"]["message"]


def build_blocks(*blocks: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": TEXT}]}]
    return {"messages": messages, "model": NAME, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def make_block(url: str = URLS[1], **source: Any) -> dict[str, Any]:
    data = url.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data} | source}


def post_blocks(server: RunningServer, body: dict[str, Any], route: str = "") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/messages{route}", json=body, timeout=60)


def test_blocks_of_images_are_read_and_counted(server: RunningServer) -> None:
    body = build_blocks(make_block(), make_block(URLS[0]))
    response = post_blocks(server, body)
    assert response.status_code == 200, response.text
    assert response.json()["content"][-1]["text"] == answer(server, URLS[1], URLS[0])
    counted = post_blocks(server, {name: body[name] for name in ("messages", "model")}, "/count_tokens")
    assert counted.json()["input_tokens"] == post(server, build_body(*URLS[:2])).json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}, "no image is fetched"),
        ({"type": "image", "source": {"type": "file", "file_id": "a"}}, "no image is fetched"),
        ({"type": "image", "source": None}, "no image is fetched"),
        ({"type": "image"}, "source"),
        (make_block(media_type="image/tiff"), "media_type"),
        (make_block(data="@"), "base64"),
        ({"type": "tool_result", "tool_use_id": "a", "content": [make_block()]}, "messages of the user"),
    ],
)
def test_blocks_of_other_images_are_refused(server: RunningServer, block: dict[str, Any], message: str) -> None:
    response = post_blocks(server, build_blocks(block))
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
