"""Models of one server: choice by the name in a request, state of all together, and the end of all."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from foredraft.server.errors import ApiError, make_unavailable_error, quote_name
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings

MAX_LISTED_CHARS = 400  # characters of the names that an error lists


class ServedModels:
    """Services of a server by name, in the order in which they were added. Any thread may read them.

    Args:
        settings: of the server. Those of a service differ from them by its names and its chat template.
        services: first models, at least one. They may be opened later.
    """

    def __init__(self, settings: ServerSettings, services: Sequence[Service]) -> None:
        self.settings = settings
        self._services = tuple(services)  # replaced as a whole, so that a reader sees all or nothing of a change
        self._leaving: tuple[Service, ...] = ()  # removed services whose requests run to their end
        self._is_stopping = False
        self._load_threads: list[threading.Thread] = []

    @classmethod
    def single(cls, service: Service) -> "ServedModels":
        """Return the models of a server with one service."""
        return cls(service.settings, [service])

    @property
    def services(self) -> tuple[Service, ...]:
        return self._services

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for service in self._services for name in service.settings.model_names)

    @property
    def open_services(self) -> tuple[Service, ...]:
        """Services whose model is loaded."""
        return tuple(service for service in self._services if service.is_open)

    @property
    def has_several(self) -> bool:
        return len(self._services) > 1

    def find(self, name: str | None) -> Service:
        """Return the service of a model; the first one without a name. Raises ApiError 404 for an unknown name."""
        first = self._services[0]
        if name is None:
            return first
        if not self.has_several:
            first.check_name(name)
            return first
        for service in self._services:
            if name in service.settings.model_names:
                return service
        listed = ", ".join(self.names)
        listed = listed if len(listed) <= MAX_LISTED_CHARS else listed[:MAX_LISTED_CHARS] + ", ..."
        raise ApiError(404, f"the model {quote_name(name)} does not exist here; the models are: {listed}", "model")

    def list_open(self) -> tuple[Service, ...]:
        """List the services whose model is loaded. Raises ApiError 503 if there is none yet."""
        if not self.open_services:
            raise make_unavailable_error("the model is still loading")
        return self.open_services

    def add(self, service: Service) -> None:
        """Add an open service. One thread at a time may add and remove."""
        if self._is_stopping:
            service.close()
            return
        self._services = (*self._services, service)

    def remove(self, service: Service) -> None:
        """Remove a service, so that no new request reaches it. It counts as leaving until `forget`."""
        self._leaving = (*self._leaving, service)
        self._services = tuple(other for other in self._services if other is not service)

    def forget(self, service: Service) -> None:
        """Drop a service that was removed and has no requests any more."""
        self._leaving = tuple(other for other in self._leaving if other is not service)

    @property
    def is_healthy(self) -> bool:
        """True unless the worker of any model has failed or hangs."""
        return all(service.is_healthy for service in self._services)

    @property
    def is_ready(self) -> bool:
        """True if all models accept new requests."""
        return not self._is_stopping and all(service.is_ready for service in self._services)

    @property
    def is_loading(self) -> bool:
        """True while a thread of `start_load` runs."""
        return any(thread.is_alive() for thread in self._load_threads)

    def start_load(self, work: Callable[[], None]) -> None:
        """Run `work` on a daemon thread, so that the server can stop while a model is loaded."""
        thread = threading.Thread(target=work, name="foredraft-load", daemon=True)
        self._load_threads = [other for other in self._load_threads if other.is_alive()] + [thread]
        thread.start()

    def stop(self) -> bool:
        """Refuse new requests of all models. Returns whether that was so before."""
        was_stopping, self._is_stopping = self._is_stopping, True
        for service in self._services:
            service.is_stopping = True
        return was_stopping

    async def drain(self, seconds: float) -> bool:
        """Wait for the requests of all models. Returns True if they ended within `seconds`."""
        return all(await asyncio.gather(*(service.drain(seconds) for service in self._running_services)))

    def abort_all(self) -> None:
        """Abort the requests of all models."""
        for service in self._running_services:
            service.abort_all()

    def close(self) -> None:
        """Stop all workers and thread pools."""
        for service in (*self._services, *self._leaving):
            service.close()

    @property
    def _running_services(self) -> tuple[Service, ...]:
        return (*self.open_services, *self._leaving)
