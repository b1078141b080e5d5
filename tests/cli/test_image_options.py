"""`--image` of generate, and the options of serve for images."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM, ImagePrompt, Sampling
from foredraft.cli.backend import CliBackend
from foredraft.cli.serve import ServeOptions, build_settings
from foredraft.cli.shell import UsageError
from foredraft.server.settings import BODY_BYTES, MAX_BODY_BYTES
from tests.support.tiny_vision import make_image, save_vision_model

TEXT, SAMPLING = "what is in the picture", Sampling(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_vision_model("llava", folder)
    for seed in range(2):
        make_image(seed).save(folder / f"{seed}.png")
    return folder


def generate(run: Any, folder: Path, prompt: str, *args: str) -> str:
    options = ("--model", str(folder), "--spec-method", "ngram", "--max-tokens", "8", "--json")
    outcome = run("generate", prompt, *options, *args, backend=CliBackend())
    assert outcome.code == 0, outcome.stderr
    return str(json.loads(outcome.stdout)["completions"][0]["text"])


def test_generate_reads_images(run, folder: Path) -> None:
    paths = [str(folder / f"{seed}.png") for seed in range(2)]
    with LLM(str(folder), None, max_images=2) as llm:
        parts = [{"type": "image", "image": path} for path in paths]
        [chat] = llm.chat([{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}], SAMPLING)
        [bare] = llm.generate([ImagePrompt(f"<image> {TEXT}", paths[:1])], SAMPLING)
    assert generate(run, folder, TEXT, "--chat", "--image", paths[0], "--image", paths[1]) == chat.text
    assert generate(run, folder, f"<image> {TEXT}", "--image", paths[0]) == bare.text


@pytest.mark.parametrize(
    ("prompt", "name", "message"),
    [(TEXT, "0.png", "write <image> once"), (f"<image> {TEXT}", "missing.png", "missing.png cannot be read")],
)
def test_generate_explains_what_is_wrong(run, folder: Path, prompt: str, name: str, message: str) -> None:
    options = ("--model", str(folder), "--spec-method", "none", "--image", str(folder / name))
    outcome = run("generate", prompt, *options, backend=CliBackend())
    assert outcome.code == 1
    assert message in " ".join(outcome.stderr.split())


def test_serve_has_limits_for_images(tmp_path: Path) -> None:
    assert build_settings(ServeOptions()).limits.max_body_bytes == BODY_BYTES
    settings = build_settings(ServeOptions(max_images=40, allowed_local_media_path=str(tmp_path)))
    assert settings.limits.max_body_bytes == MAX_BODY_BYTES
    assert settings.media_folder == str(tmp_path.resolve())
    assert ServeOptions(max_images=3).num_images == 3
    with pytest.raises(UsageError, match="no folder"):
        build_settings(ServeOptions(allowed_local_media_path=str(tmp_path / "missing")))
    with pytest.raises(UsageError, match="add --max-images"):
        build_settings(ServeOptions(allowed_local_media_path=str(tmp_path)))


def test_a_batch_reads_images(run, folder: Path, tmp_path: Path) -> None:
    def write_line(url: str) -> str:
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
        return json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 8})

    data = base64.b64encode((folder / "0.png").read_bytes()).decode()
    urls = [f"data:image/png;base64,{data}", f"file://{folder}/1.png", "http://x/a.png", "file:///etc/passwd"]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(write_line, urls)))
    options = ("--model", str(folder), "--spec-method", "ngram", "--max-images", "1")
    outcome = run("batch", str(source), str(out), *options, "--allowed-local-media-path", str(folder))
    assert outcome.code == 0, outcome.stderr
    rows = [json.loads(line)["response"] for line in out.read_text().splitlines()]
    assert [row["status_code"] for row in rows] == [200, 200, 400, 400]
    texts = [row["body"]["choices"][0]["message"]["content"] for row in rows[:2]]
    paths = [str(folder / name) for name in ("0.png", "1.png")]
    assert texts == [generate(run, folder, TEXT, "--chat", "--image", path) for path in paths]


def test_a_chat_reads_images(run, folder: Path) -> None:
    path = str(folder / "0.png")
    options = ("--model", str(folder), "--spec-method", "ngram", "--max-tokens", "8", "--max-images", "2")
    outcome = run("chat", *options, stdin=f"/image {path}\n{TEXT}\n", backend=CliBackend())
    assert outcome.stdout.strip() == generate(run, folder, TEXT, "--chat", "--image", path).strip()
