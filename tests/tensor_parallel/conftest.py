"""A tiny target in two processes, started once for each file."""

from collections.abc import Iterator

import pytest

from foredraft import LLM
from tests.support import tiny_models


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("target"))
    tiny_models.target().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def parallel(target_folder: str) -> Iterator[LLM]:
    """The tiny target in two processes, without a drafter; it checks its integrity after every step."""
    with LLM(target_folder, None, is_debug=True, tensor_parallel_size=2) as llm:
        yield llm
