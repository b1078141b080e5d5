"""What the routes share: the model, its worker, its vocabulary, a few threads for tokenising."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from foredraft.engine.worker import Draining, QueueFull, Worker, WorkerLimits
from foredraft.errors import ForedraftError
from foredraft.models.prompts import prompt_length
from foredraft.request import RequestOptions
from foredraft.sampling import Sampling
from foredraft.server.errors import ApiError, shown, too_busy, unavailable
from foredraft.server.generation import Generation
from foredraft.server.metrics import Metrics
from foredraft.server.prompts import check_size, encode_text
from foredraft.server.protocol import Generating, text_of
from foredraft.server.settings import Settings
from foredraft.server.templates import Templates
from foredraft.server.vocabulary import Vocabulary

if TYPE_CHECKING:
    from foredraft.llm import LLM

Value = TypeVar("Value")
NUM_THREADS = 2  # tokenisers release the interpreter's lock, so that one long prompt does not hold up the rest


@dataclass(frozen=True)
class Job:
    """One prompt with how it is to be continued."""

    ids: list[int]
    sampling: Sampling
    options: RequestOptions
    grammar_field: str | None = None  # what asked for its grammar


class Service:
    """Of one model. Without a model yet it refuses politely: a server may listen while it loads."""

    def __init__(self, settings: Settings, limits: WorkerLimits | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.names[0], settings.has_vllm_names)
        self.pool = ThreadPoolExecutor(NUM_THREADS, "foredraft-prepare")
        self.created = int(time.time())
        self.is_stopping = False
        self._limits = limits
        self._open: _Open | None = None

    def open(self, llm: "LLM") -> None:
        """The model is there: start its worker. Any thread may call it, once."""
        worker = Worker(llm, self._limits, self.metrics)
        self.metrics.watch(worker)
        vocabulary = Vocabulary(llm.tokenizer, llm.target.vocab_size)
        templates = Templates(vocabulary, self.settings, llm.target.has_encoder)
        worker.start()
        self._open = _Open(llm, worker, vocabulary, templates)

    @property
    def llm(self) -> "LLM":
        return self._there.llm

    @property
    def worker(self) -> Worker:
        return self._there.worker

    @property
    def vocabulary(self) -> Vocabulary:
        return self._there.vocabulary

    @property
    def templates(self) -> Templates:
        return self._there.templates

    @property
    def is_open(self) -> bool:
        """The model is loaded."""
        return self._open is not None

    @property
    def is_healthy(self) -> bool:
        """Alive; a model that is still loading is no reason to be killed."""
        return self._open is None or self._open.worker.is_healthy

    @property
    def is_ready(self) -> bool:
        return self._open is not None and not self.is_stopping and self._open.worker.is_accepting

    def check_name(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not this one."""
        if name is not None and name not in self.settings.names:
            raise ApiError(404, f"the model {shown(name)} does not exist here; GET the list of models", "model")

    @property
    def longest(self) -> int:
        """Tokens a prompt and its output may have together."""
        allocator = self.llm.engine.scheduler.allocator
        return min(self.llm.target.context_length, (allocator.num_pages - 1) * allocator.page_size)

    @property
    def longest_prompt(self) -> int:
        """Tokens a prompt may have: what an encoder reads leaves the output its whole length."""
        return self.longest - 1 if self.llm.target.source_length is None else self.llm.target.source_length

    def check_length(self, num_tokens: int, param: str = "prompt") -> None:
        most = self.longest_prompt
        if num_tokens > most:
            raise ApiError(400, f"the prompt has {num_tokens} tokens and the model takes {most}; shorten it", param)

    def room_after(self, num_tokens: int) -> int:
        """Tokens an output may have after a prompt of this many."""
        return self.longest - prompt_length(self.llm.target, num_tokens)

    def check_room(self, num_tokens: int, most: int | None, param: str = "max_tokens") -> None:
        """Raises ApiError 400 for an output that may become longer than the context has room for, where the settings
        are strict; otherwise it ends there. `most`: what the client wants, None = whatever fits."""
        room = self.room_after(num_tokens)
        if self.settings.is_strict and most is not None and most > room:
            raise ApiError(
                400,
                f"{param} is {most}, the prompt has {num_tokens} tokens and the context holds {self.longest}; "
                f"ask for at most {room}",
                param,
            )

    async def off_loop(self, work: Callable[..., Value], *args: Any) -> Value:
        """Run on one of the few threads. Raises ApiError for what the library refuses."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work, *args)
        except ForedraftError as error:
            raise ApiError(400, self._without_name(str(error))) from None

    def predicted(self, request: Generating) -> tuple[int, ...]:
        """Tokens of the text that the output is expected to hold."""
        if request.prediction is None:
            return ()
        text = text_of(request.prediction.content)
        check_size(self, len(text), "prediction")
        return tuple(encode_text(self, text, has_special=False)[0]) if text else ()

    async def submit(self, jobs: Sequence[Job]) -> Generation:
        """Put the prompts on the worker. Raises ApiError: 400 for what can never run, 429, 503."""
        began = time.monotonic()
        self._check_open()
        transcripts = await self.off_loop(self._prepare, jobs)
        timeout = self.settings.request_timeout
        try:
            stream = await self.worker.submit(transcripts, None if timeout is None else began + timeout)
        except QueueFull as error:
            raise too_busy(error.retry_after) from None
        except Draining:
            raise self._draining() from None
        except ForedraftError as error:
            raise ApiError(400, self._without_name(str(error))) from None
        return Generation(stream, self.metrics, began)

    def close(self) -> None:
        """Stop the worker's thread and our own."""
        if self._open is not None:
            self._open.worker.stop()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _check_open(self) -> None:
        if self.is_stopping:
            raise self._draining()

    def _draining(self) -> ApiError:
        return unavailable("the server is shutting down")

    @property
    def _there(self) -> "_Open":
        if self._open is None:
            raise unavailable("the model is still loading")
        return self._open

    def _prepare(self, jobs: Sequence[Job]) -> list[Any]:
        result: list[Any] = []
        for job in jobs:
            try:
                result += self.llm.prepare(job.ids, job.sampling, job.options, first_index=len(result))
            except ForedraftError as error:
                param = job.grammar_field if "grammar" in str(error) else None
                raise ApiError(400, self._without_name(str(error)), param) from None
        return result

    def _without_name(self, message: str) -> str:
        """A model's name may be a folder of this machine."""
        return message.replace(self.llm.target.name, self.settings.names[0])


@dataclass(frozen=True)
class _Open:
    llm: "LLM"
    worker: Worker
    vocabulary: Vocabulary
    templates: Templates
