"""Processing of lines by a service, as if a client had sent them."""

from dataclasses import replace

from foredraft.batch.asgi_client import post_json
from foredraft.batch.line import BatchLine
from foredraft.batch.result import LineResult
from foredraft.engine.worker import WorkerLimits
from foredraft.llm import LLM
from foredraft.server.adapter_service import AdapterService
from foredraft.server.app import create_app
from foredraft.server.served_models import ServedModels
from foredraft.server.service import Service
from foredraft.server.settings import RequestLimits, ServerSettings

REQUESTS_PER_SLOT = 2  # requests at a time for each that the engine runs, so that one waits when another ends


class LineProcessor:
    """Processor of lines with one loaded model.

    Args:
        llm: target with a drafter. Requests may name its adapters as models.
        model_name: name of the model in requests and results.
        limits: limits of requests.
        media_folder: folder with the files that requests may name in file URLs. Default None = none.
    """

    def __init__(self, llm: LLM, model_name: str, limits: RequestLimits, media_folder: str | None = None) -> None:
        self.concurrency = REQUESTS_PER_SLOT * llm.limits.max_batch
        settings = ServerSettings(
            model_names=(model_name,), request_timeout=None, limits=limits, media_folder=media_folder
        )
        largest = settings.limits.max_samples
        self._service = Service(settings, WorkerLimits(max_queue=self.concurrency * largest))
        self._service.open(llm)
        self._adapters = [self._open_adapter(name, settings) for name in llm.adapter_names]
        self._app = create_app(ServedModels(settings, [self._service, *self._adapters]))

    def _open_adapter(self, name: str, settings: ServerSettings) -> AdapterService:
        own = replace(settings, model_names=(name,))
        service = AdapterService(own, settings.model_names[0], lambda: self._service)
        service.open(self._service.llm)
        return service

    async def process(self, line: BatchLine) -> LineResult:
        """Process a line; an invalid one or a failed request has an error as its result."""
        if line.error:
            return LineResult(line, None, {})
        body = line.body if line.body.get("request_id") else line.body | {"request_id": f"batch-{line.number}"}
        status, content = await post_json(self._app, line.url, body)
        return LineResult(line, status, content)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine can run further requests."""
        return self._service.is_healthy

    def close(self) -> None:
        """Stop the engine."""
        for service in (*self._adapters, self._service):
            service.close()
