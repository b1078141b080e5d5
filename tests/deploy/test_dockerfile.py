"""The Dockerfile follows rules in the manner of hadolint, and its context has what the build reads."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.dockerfile import find_faults, is_in_context, parse_dockerfile

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
DOCKERFILE = parse_dockerfile(TEXT)
IGNORED = [line for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line and line[0] != "#"]


def test_it_has_no_fault():
    assert list(find_faults(TEXT)) == []
    assert set(DOCKERFILE.targets) == {"cpu", "cuda"}
    assert list(DOCKERFILE.stages)[-1] == "cpu", "the last stage is what a build without --target makes"


@pytest.mark.parametrize(
    ("present", "fault", "message"),
    [
        ("python:3.12-slim-bookworm", "python:latest", "wheel: the base image python:latest is not pinned"),
        ("python:3.12-slim-bookworm", "python", "wheel: the base image python is not pinned"),
        ("COPY src src", "ADD src src", "wheel: ADD unpacks"),
        ("    && rm -rf /var/lib/apt/lists/*\n", "", "wheel: apt-get install without rm"),
        ("RUN apt-get update \\\n    &&", "RUN", "wheel: apt-get install without apt-get update"),
        ("pip install --no-cache-dir", "pip install", "environment: pip without --no-cache-dir"),
        ("COPY src src", "RUN pip download https://example.org", "an address in the file"),
        ("COPY src src", "RUN curl example.org", "wheel: sudo, curl or wget"),
        ("USER 10001:10001\n", "", "cuda: runs as root"),
        ("USER 10001:10001", "USER foredraft", "cpu: runs as foredraft"),
        ("ENV NVIDIA", "ENV FOREDRAFT_API_KEY=x \\\n    NVIDIA", "cuda: a secret as ENV"),
        ('CMD ["python", "/opt/foredraft/healthcheck.py"]', "CMD python check.py", "cuda: HEALTHCHECK in shell form"),
        ('ENTRYPOINT ["foredraft", "serve"', "ENTRYPOINT foredraft serve #", "cpu: ENTRYPOINT is absent or in shell"),
        ("CMD []", "CMD serve", "cpu: CMD is absent or in shell form"),
    ],
)
def test_the_rules_find_seeded_faults(present, fault, message):
    assert present in TEXT
    found = list(find_faults(TEXT.replace(present, fault)))
    assert any(line.startswith(message) for line in found), found


def list_copied_files() -> list[str]:
    """List the paths that the build takes from its context."""
    texts = [text for stage in DOCKERFILE.stages.values() for text in stage.find("COPY")]
    return [source for text in texts if not text.startswith("--from=") for source in text.split()[:-1]]


def test_everything_that_is_copied_exists_and_is_in_the_context():
    assert len(list_copied_files()) >= 8
    for source in list_copied_files():
        assert (ROOT / source).exists(), source
        assert is_in_context(source, IGNORED), source


@pytest.mark.parametrize(
    "path",
    [
        "src/foredraft/server/static/index.html",
        "src/foredraft/kernels/cpu/isa.c",
        "src/foredraft/zoo/target/model.safetensors",
        "LICENSES/x",
    ],
)
def test_the_context_has(path):
    assert is_in_context(path, IGNORED)


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        "deploy/.env",
        "src/foredraft/kernels/cpu/_foredraft.so",
        "src/foredraft/__pycache__/llm.pyc",
        "tests/test_llm.py",
    ],
)
def test_the_context_leaves_out(path):
    """A secret, a library of another machine, or the history of the repository would become part of an image."""
    assert not is_in_context(path, IGNORED)


def test_a_wheel_can_be_built_from_what_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {"pyproject.toml", "hatch_build.py", "README.md", "src"}
    needed |= {pattern.removesuffix("/*") for pattern in project["license-files"]}
    assert needed <= set(list_copied_files())
    assert "FOREDRAFT_REQUIRE_NATIVE=1 pip wheel" in TEXT


def test_torch_is_the_release_that_the_tests_run_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = Requirement(DOCKERFILE.arguments["TORCH"])
    [declared] = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
    [version] = [part.version for part in pinned.specifier]
    assert declared.specifier.contains(version)
    assert f"pip install torch=={version}" in (ROOT / "README.md").read_text("utf-8")


def test_the_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert "[grammar,serve]" in TEXT
    assert {"grammar", "serve"} <= set(project["optional-dependencies"])
