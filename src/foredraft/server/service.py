"""State that all routes share: model, worker, vocabulary, chat template, and threads for tokenization."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from foredraft.engine.worker import DrainingError, QueueFullError, Worker, WorkerLimits
from foredraft.errors import ForedraftError
from foredraft.image_prompt import EncodedImagePrompt
from foredraft.models.prompts import count_prompt_tokens
from foredraft.placed_images import PlacedImages
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling
from foredraft.server.errors import ApiError, make_queue_full_error, make_unavailable_error, quote_name
from foredraft.server.generation import Generation
from foredraft.server.messages.dialect import Dialect
from foredraft.server.metrics import ServerMetrics
from foredraft.server.preparation_threads import PreparationThreads
from foredraft.server.settings import ServerSettings
from foredraft.server.templates import ChatTemplate
from foredraft.server.vocabulary import ServerVocabulary

if TYPE_CHECKING:
    from foredraft.llm import LLM

Value = TypeVar("Value")


@dataclass(frozen=True)
class PromptSubmission:
    """One tokenized prompt with its sampling parameters and options."""

    ids: list[int]
    sampling: Sampling
    options: RequestOptions
    grammar_field: str | None = None  # field of the request that sets the grammar
    images: PlacedImages | None = None  # images of the prompt

    @property
    def prompt(self) -> list[int] | EncodedImagePrompt:
        """Prompt for the model."""
        return self.ids if self.images is None else EncodedImagePrompt(tuple(self.ids), self.images)


class Service:
    """Shared state of all routes, for one model. Until the model has loaded, requests get status 503.

    Args:
        settings: of the server, with the names of the model.
        limits: of the queue. Default None = those of a Worker.
        base_name: name of the model to which this adapter belongs. Default None = a model of its own.
    """

    def __init__(
        self, settings: ServerSettings, limits: WorkerLimits | None = None, base_name: str | None = None
    ) -> None:
        self.settings, self.base_name = settings, base_name
        self.metrics = ServerMetrics(settings.model_names[0], settings.has_vllm_names)
        self.threads = PreparationThreads()
        self.created = int(time.time())
        self.is_stopping = False
        self.stop_message = "the server is shutting down"  # of the 503 that requests get while it stops
        self._limits = limits
        self._loaded_model: _LoadedModel | None = None

    def open(self, llm: "LLM") -> None:
        """Start the worker of a loaded model. Called once, on any thread."""
        worker = Worker(llm, self._limits, self.metrics)
        self.metrics.attach_worker(worker, None if llm.rule is None else llm.rule.simulated_rate)
        loaded = self._describe_model(llm, worker, ServerVocabulary(llm.tokenizer, llm.target.vocab_size))
        worker.start()
        self._loaded_model = loaded

    def _describe_model(self, llm: "LLM", worker: Worker, vocabulary: ServerVocabulary) -> "_LoadedModel":
        """Return a loaded model with the chat template and the formats of the settings."""
        templates = ChatTemplate(vocabulary, self.settings, llm.target.has_encoder)
        dialect = Dialect.from_template(
            templates.source, vocabulary.special_ids, self.settings.tool_call_parser, self.settings.reasoning_parser
        )
        return _LoadedModel(llm, worker, vocabulary, templates, dialect)

    @property
    def llm(self) -> "LLM":
        return self._required_model.llm

    @property
    def worker(self) -> Worker:
        return self._required_model.worker

    @property
    def shares_engine(self) -> bool:
        """Whether the requests run in the engine of the base."""
        return False

    @property
    def vocabulary(self) -> ServerVocabulary:
        return self._required_model.vocabulary

    @property
    def chat_template(self) -> ChatTemplate:
        return self._required_model.chat_template

    @property
    def dialect(self) -> Dialect:
        return self._required_model.dialect

    @property
    def is_open(self) -> bool:
        """True if the model is loaded."""
        return self._loaded_model is not None

    @property
    def is_healthy(self) -> bool:
        """True unless the worker has failed or hangs. A server that still loads its model is healthy."""
        return self._loaded_model is None or self.worker.is_healthy

    @property
    def is_ready(self) -> bool:
        """True if new requests are accepted."""
        return self._loaded_model is not None and not self.is_stopping and self.worker.is_accepting

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 if `name` is not a name of this model."""
        if name is not None and name not in self.settings.model_names:
            raise ApiError(404, f"the model {quote_name(name)} does not exist here; GET the list of models", "model")

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a prompt and its output together."""
        allocator = self.llm.engine.scheduler.allocator
        return min(self.llm.target.context_length, (allocator.num_pages - 1) * allocator.page_size)

    @property
    def max_prompt_length(self) -> int:
        """Maximum number of tokens of a prompt. The input of an encoder does not count against the output."""
        return self.max_length - 1 if self.llm.target.source_length is None else self.llm.target.source_length

    def check_length(self, num_tokens: int, param: str = "prompt") -> None:
        """Raise ApiError 400 for a prompt that is too long."""
        limit = self.max_prompt_length
        if num_tokens > limit:
            raise ApiError(400, f"the prompt has {num_tokens} tokens and the model takes {limit}; shorten it", param)

    def count_free_tokens(self, num_tokens: int) -> int:
        """Count the tokens that an output may have after a prompt of `num_tokens`."""
        return self.max_length - count_prompt_tokens(self.llm.target, num_tokens)

    def count_cacheable(self, num_tokens: int) -> int:
        """Count the tokens of a prompt that the prefix cache keeps for later requests: those of full pages."""
        scheduler = self.llm.engine.scheduler
        cache, page_size = scheduler.prefix_cache, scheduler.allocator.page_size
        return num_tokens // page_size * page_size if cache.is_active and cache.is_shared else 0

    def check_output_length(self, num_tokens: int, max_tokens: int | None, param: str = "max_tokens") -> None:
        """Raise ApiError 400 if `max_tokens` exceeds the context and the settings are strict.

        Without strict settings, the output ends at the context length.

        Args:
            num_tokens: tokens of the prompt.
            max_tokens: value of the request. None = as many as fit.
            param: field of the request.
        """
        limit = self.count_free_tokens(num_tokens)
        if self.settings.has_strict_max_tokens and max_tokens is not None and max_tokens > limit:
            raise ApiError(
                400,
                f"{param} is {max_tokens}, the prompt has {num_tokens} tokens and the context holds {self.max_length}; "
                f"ask for at most {limit}",
                param,
            )

    async def run_off_loop(self, work: Callable[..., Value], *args: Any, has_images: bool = False) -> Value:
        """Run blocking work on a thread; convert ForedraftError to ApiError 400."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads.choose(has_images), work, *args)
        except ForedraftError as error:
            raise ApiError(400, self._replace_model_path(str(error))) from None

    async def submit(self, submissions: Sequence[PromptSubmission]) -> Generation:
        """Submit the prompts to the worker.

        Raises:
            ApiError: 400 if a request can never run, 429 if the queue is full, 503 during shutdown.
        """
        start = time.monotonic()
        self._check_accepting()
        transcripts = await self.run_off_loop(self._prepare_transcripts, submissions)
        timeout = self.settings.request_timeout
        try:
            stream = await self.worker.submit(transcripts, None if timeout is None else start + timeout)
        except QueueFullError as error:
            raise make_queue_full_error(error.retry_after) from None
        except DrainingError:
            raise self._make_draining_error() from None
        except ForedraftError as error:
            raise ApiError(400, self._replace_model_path(str(error))) from None
        return Generation(stream, self.metrics, start)

    def stop(self, message: str) -> None:
        """Refuse new requests with a message from now on."""
        self.stop_message, self.is_stopping = message, True

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, and wait for the others. Returns True if they ended within `seconds`."""
        return await self.worker.drain(seconds)

    def abort_all(self) -> None:
        """Abort all requests."""
        self.worker.abort_all()

    def close(self) -> None:
        """Stop the worker and the thread pool."""
        if self._loaded_model is not None:
            self.worker.stop()
        self.threads.close()

    def _check_accepting(self) -> None:
        if self.is_stopping:
            raise self._make_draining_error()

    def _make_draining_error(self) -> ApiError:
        return make_unavailable_error(self.stop_message)

    @property
    def _required_model(self) -> "_LoadedModel":
        if self._loaded_model is None:
            raise make_unavailable_error("the model is still loading")
        return self._loaded_model

    def _prepare_transcripts(self, submissions: Sequence[PromptSubmission]) -> list[Any]:
        result: list[Any] = []
        for prompt in submissions:
            try:
                result += self.llm.prepare(prompt.prompt, prompt.sampling, prompt.options, first_index=len(result))
            except ForedraftError as error:
                param = prompt.grammar_field if "grammar" in str(error) else None
                raise ApiError(400, self._replace_model_path(str(error)), param) from None
        return result

    def _replace_model_path(self, message: str) -> str:
        """Replace the target's name by the served name: it may be a folder of this machine."""
        return message.replace(self.llm.target.name, self.settings.model_names[0])


@dataclass(frozen=True)
class _LoadedModel:
    llm: "LLM"
    worker: Worker
    vocabulary: ServerVocabulary
    chat_template: ChatTemplate
    dialect: Dialect
