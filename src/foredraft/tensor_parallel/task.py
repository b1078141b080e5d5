"""Task of each process of tensor parallelism: the part of the model that it loads."""

import logging
import warnings
from dataclasses import dataclass

import torch
from transformers.utils import logging as transformers_logging

from foredraft.models.hf import HFModel
from foredraft.models.loading import check_cpu_dtype, load_model
from foredraft.tensor_parallel.process_group import form_group, limit_waits
from foredraft.tensor_parallel.shard import Shard


@dataclass(frozen=True)
class RankTask:
    """Part of a model that one process loads. All processes load at the same time, and make one pass to check it."""

    rank: int
    size: int  # number of processes
    model: str  # folder or hub id
    name: str  # name of the model in errors
    dtype: str | torch.dtype
    device: str  # type of the devices
    store: str  # path of a new file, by which the processes find each other
    num_threads: int  # of torch in every process but that of rank 0

    def load(self) -> HFModel:
        """Join the process group and load the part of this process.

        Raises:
            ForedraftError: the model cannot be loaded, or paged attention cannot serve it.
        """
        device = torch.device("cuda", self.rank) if self.device == "cuda" else torch.device("cpu")
        with form_group(self.rank, self.size, device, self.store), torch.no_grad():
            model = load_model(self.model, self.dtype, device, self.size)
            check_cpu_dtype(model)
            lm = HFModel.wrap_model(model, self.name)
            limit_waits()  # not before: processes read their parts of a large model at different speeds
            return lm

    def load_shard(self) -> Shard:
        """Load the part of a process of its own, in silence: rank 0 prints the same warnings."""
        torch.set_num_threads(self.num_threads)
        warnings.simplefilter("ignore")
        transformers_logging.disable_progress_bar()
        logging.disable(logging.CRITICAL)
        return Shard(self.load())
