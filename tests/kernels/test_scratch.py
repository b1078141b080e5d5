"""The check that all tests run under finds a write behind a block, and nothing else."""

from foredraft.kernels.scratch import ScratchPool
from tests.support.guarded_scratch import GUARD_BYTES, guard_scratch


def test_a_write_behind_a_block_is_found() -> None:
    pool = ScratchPool()
    with guard_scratch() as overrun:
        block = pool.take(100)
        block.fill_(7)
        pool.give_back(block)
        assert overrun == []
        block = pool.take(100)
        block.as_strided((1,), (1,), 100 + GUARD_BYTES // 2).fill_(7)
        pool.give_back(block)
        assert overrun == [100]
