"""Default sizes of the KV memory on a CPU and on a GPU."""

import pytest
import torch

from foredraft.kv.sizing import MemoryLimits

FREE = 1000 * 16 * 64  # bytes: 1000 pages of 16 tokens with 64 bytes each


@pytest.mark.parametrize(("device", "pages"), [("cpu", 250), ("cuda", 800)])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_default_is_a_share_of_the_free_memory(
    device: str, pages: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foredraft.kv.sizing.get_available_memory", lambda device: FREE)
    limits = MemoryLimits(kv_share=share)
    assert limits.num_pages(1 << 20, 64, torch.device(device)) == int(pages * share) + 1


def test_a_full_batch_at_full_context_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foredraft.kv.sizing.get_available_memory", lambda device: FREE)
    assert MemoryLimits(max_batch=4).num_pages(64, 64, torch.device("cuda")) == 4 * 64 // 16 + 1
