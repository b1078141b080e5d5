"""Loading and unloading of the models of a server, at its start and while it runs."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from foredraft.engine.worker import WorkerLimits
from foredraft.errors import ForedraftError
from foredraft.server.adapter_service import AdapterService
from foredraft.server.errors import ApiError, make_unavailable_error
from foredraft.server.kv_shares import KVShare, KVShares
from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings

if TYPE_CHECKING:
    from foredraft.llm import LLM

Value = TypeVar("Value")
UNLOADING_MESSAGE = "the model is being unloaded"
BUSY_MESSAGE = "another model is being loaded or unloaded; try again when that is done"


@dataclass(frozen=True)
class ModelSource:
    """Source of one served model."""

    settings: ServerSettings  # with the names and the chat template of the model
    load: "Callable[[KVShare, LLM | None], LLM]"  # second argument: LLM of `base_name`, if that is not None
    limits: WorkerLimits | None = None  # None = the defaults
    weight: float = 1.0  # weight in the division of the KV memory
    kv_memory: int | None = None  # KV memory in bytes beside that of all models; None = a share of it
    base_name: str | None = None  # name of the model to which this adapter belongs; None = a model of its own
    shares_engine: bool = False  # whether the adapter runs in the engine of its base, and has no KV memory of its own

    @property
    def name(self) -> str:
        return self.settings.model_names[0]


class ModelHost:
    """Models of a server with their KV memory; changes are made one at a time.

    Args:
        settings: of the server.
        sources: first models, at least one; an adapter comes after its base.
        kv_total: KV memory of all models in bytes. None = the default share of the free memory.
        report: receives one line for each model that is loaded or unloaded while the server runs.
    """

    def __init__(
        self,
        settings: ServerSettings,
        sources: Sequence[ModelSource],
        kv_total: int | None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._sources, self._report = tuple(sources), report
        self._shares = KVShares(kv_total)
        self._is_changing = False
        self._change: asyncio.Task[Any] | None = None  # keeps the task of a change alive
        self.models = ServedModels(settings, [self._make_service(source) for source in sources])

    def load_first(self) -> None:
        """Load the first models, one after the other. Runs on a thread."""
        engines = [source for source in self._sources if not source.shares_engine]
        shares = self._shares.divide({source.name: source.weight for source in engines})
        for source, service in zip(self._sources, self.models.services, strict=True):
            service.open(source.load(shares.get(source.name, KVShare()), self._find_base(source)))

    async def load(self, source: ModelSource) -> Service:
        """Load a further model on a thread, and add it; requests of the other models go on.

        Raises:
            ApiError: 409 for a name that is taken, without free KV memory, or during another change.
            ForedraftError: the model cannot be loaded.
        """
        self.check_free(source.name)
        service = await self._run_to_end(self._load(source))
        self._report(f"serving {source.name}")
        return service

    async def _load(self, source: ModelSource) -> Service:
        with self._claim_change():
            if source.shares_engine:
                return await self._load_on_thread(source, KVShare())
            try:
                share = self._shares.assign(source.name, source.weight, source.kv_memory)
            except ForedraftError as error:
                raise ApiError(409, str(error), "kv_memory") from None
            try:
                return await self._load_on_thread(source, share)
            except BaseException:
                self._shares.release(source.name)
                raise

    def check_free(self, name: str) -> None:
        """Raise ApiError 409 if a model has this name."""
        if name in self.models.names:
            raise ApiError(409, f"a model with the name {name!r} is loaded; unload it first", "name")

    async def unload(self, name: str) -> None:
        """Refuse new requests of a model, let the running ones end within the drain time, and free the model.

        The memory is free when the last response of the model is sent.

        Raises:
            ApiError: 404 for an unknown name, 409 for the last model, for the base of an adapter in its engine, or
                during another change.
        """
        service = self.models.find(name)
        if not self.models.has_several:
            raise ApiError(409, "the last model cannot be unloaded; load another one first, or stop the server", "name")
        adapters = [other.settings.model_names[0] for other in self.models.services if _runs_in(other, service)]
        if adapters:
            raise ApiError(
                409, f"adapters run in this model's engine; unload them first: {', '.join(adapters)}", "name"
            )
        await self._run_to_end(self._unload(service))
        self._report(f"unloaded {name}")

    async def _unload(self, service: Service) -> None:
        with self._claim_change():
            service.stop(UNLOADING_MESSAGE)
            self.models.remove(service)
            if not await service.drain(service.settings.drain_timeout):
                service.abort_all()
            await asyncio.to_thread(service.close)
            service.metrics.detach_worker()
            self.models.forget(service)
            self._shares.release(service.settings.model_names[0])

    async def _load_on_thread(self, source: ModelSource, share: KVShare) -> Service:
        loaded: Future[Service] = Future()

        def work() -> None:
            try:
                service = self._make_service(source)
                service.open(source.load(share, self._find_base(source)))
                gc.freeze()  # as after the first models: later collections skip the objects of torch
                self.models.add(service)
            except BaseException as error:
                loaded.set_exception(error)
            else:
                loaded.set_result(service)

        self.models.start_load(work)
        return await asyncio.wrap_future(loaded)

    async def _run_to_end(self, change: Coroutine[Any, Any, Value]) -> Value:
        """Run a change as a task of its own, which goes on if the client leaves."""
        task = self._change = asyncio.ensure_future(change)
        return await asyncio.shield(task)

    def _make_service(self, source: ModelSource) -> Service:
        if source.base_name is None or not source.shares_engine:
            return Service(source.settings, source.limits, source.base_name)
        return AdapterService(source.settings, source.base_name, partial(self._find_service, source.base_name))

    def _find_service(self, name: str) -> Service:
        return self.models.find(name)

    def _find_base(self, source: ModelSource) -> "LLM | None":
        return None if source.base_name is None else self.models.find(source.base_name).llm

    @contextmanager
    def _claim_change(self) -> Iterator[None]:
        if self._is_changing:
            raise ApiError(409, BUSY_MESSAGE)
        if len(self.models.open_services) < len(self.models.services):
            raise make_unavailable_error("the first models are still loading")
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False


def _runs_in(service: Service, base: Service) -> bool:
    """Return whether a service is an adapter in the engine of another one."""
    return service.shares_engine and service.base_name in base.settings.model_names
