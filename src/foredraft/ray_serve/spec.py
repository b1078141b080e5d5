"""Settings that every replica needs to start; they are sent to the replica's process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foredraft.engine.worker import WorkerLimits
from foredraft.errors import ForedraftError
from foredraft.server.settings import ServerSettings

if TYPE_CHECKING:
    from foredraft.llm import LLM


@dataclass(frozen=True)
class ReplicaSpec:
    """Settings of the replicas of one model."""

    settings: ServerSettings
    limits: WorkerLimits
    loader: "Callable[[], LLM]"  # can be pickled
    secret: str  # value that the front sends with each request
    num_threads: int  # threads of one replica
    num_gpus: int = 0  # GPUs of one replica
    min_replicas: int = 1
    max_replicas: int = 1  # above min_replicas: replicas are added and removed by load
    target_load: float = 16.0  # requests per replica that running and waiting ones are divided by
    host: str | None = None  # address that replicas listen on; None = that of their machine

    def __post_init__(self) -> None:
        """Raise ForedraftError for an impossible number of replicas."""
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ForedraftError(
                f"the smallest number of replicas is {self.min_replicas} and the largest {self.max_replicas}; "
                "give numbers from 1 up, in this order"
            )

    @property
    def is_fixed(self) -> bool:
        """Whether the number of replicas does not change."""
        return self.min_replicas == self.max_replicas

    @property
    def description(self) -> str:
        """Number of replicas and of their threads, in words."""
        number = str(self.min_replicas) if self.is_fixed else f"{self.min_replicas} to {self.max_replicas}"
        return f"{number} replicas of {self.num_threads} threads"
