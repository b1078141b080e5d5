"""Sizes of recorded passes: a pass is padded to the next size, so that few recordings serve all of them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.kernels.gpu.rows import RowsLayout
from foredraft.models.forward_batch import ForwardBatch

ROW_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows, and rows with logits
REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MIN_KEYS = 512  # a power of two
TAILS_PER_ROW = 32  # slots in the paths of the rows, on average; a longer draft runs unrecorded


@dataclass(frozen=True)
class PassSize:
    """Size of a recorded pass. All numbers are upper limits of the passes that it serves."""

    rows: int  # T
    requests: int  # B
    logit_rows: int  # R
    keys: int  # of a request
    page_size: int

    @classmethod
    def fit(cls, batch: ForwardBatch) -> "PassSize | None":
        """Return the smallest size for a forward batch; None if it is larger than all recorded passes."""
        rows = round_up(batch.num_rows, ROW_BUCKETS)
        requests = round_up(len(batch.spans), REQUEST_BUCKETS)
        logit_rows = round_up(len(batch.logit_row_list), ROW_BUCKETS)
        if rows is None or requests is None or logit_rows is None:
            return None
        longest = max(span.num_keys for span in batch.spans)
        size = cls(rows, requests, logit_rows, max(1 << (longest - 1).bit_length(), MIN_KEYS), batch.page_size)
        return size if batch.packed_rows.counts[4] < size.num_tails else None

    @property
    def num_tails(self) -> int:
        """Slots in the paths of all rows."""
        return self.rows * TAILS_PER_ROW

    @property
    def layout(self) -> RowsLayout:
        """Places of the lists. The rows of padding are a further request."""
        pages = self.requests * -(-self.keys // self.page_size)
        by_row = (self.rows,) * 3
        return RowsLayout((*by_row, self.logit_rows, pages, self.rows, self.num_tails, *by_row, self.requests + 2))


def round_up(count: int, buckets: Sequence[int]) -> int | None:
    """Return the first bucket that holds `count`; None if none does."""
    i = bisect_left(buckets, count)
    return buckets[i] if i < len(buckets) else None
