"""`--image` of generate, and the options of serve for images."""

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
