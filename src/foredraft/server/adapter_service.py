"""LoRA adapter as a model of a server, in the engine of its base."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foredraft.errors import ForedraftError
from foredraft.server.kv_shares import KVShare
from foredraft.server.service import PromptSubmission, Service
from foredraft.server.settings import ServerSettings

if TYPE_CHECKING:
    from foredraft.llm import LLM


class AdapterService(Service):
    """Service whose requests run in the engine of another one, with an adapter.

    Args:
        settings: of the server, with the name of the adapter.
        base_name: name of the base.
        find_base: returns the service of the base.
    """

    def __init__(self, settings: ServerSettings, base_name: str, find_base: Callable[[], Service]) -> None:
        super().__init__(settings, base_name=base_name)
        self._find_base = find_base

    @property
    def shares_engine(self) -> bool:
        """True: the worker is the base's."""
        return True

    def open(self, llm: "LLM") -> None:
        """Use the worker of the base, which has loaded the adapter under the name of this service."""
        base = self._find_base()
        self._loaded_model = self._describe_model(llm, base.worker, base.vocabulary)
        base.metrics.add_adapter(self.settings.model_names[0], self.metrics)

    async def drain(self, seconds: float) -> bool:
        """Return True at once: running requests go on in the engine of the base."""
        return True

    def abort_all(self) -> None:
        """Do nothing: the base aborts the requests of its engine."""

    def close(self) -> None:
        """Remove the adapter, and stop the threads."""
        if self._loaded_model is not None:
            name = self.settings.model_names[0]
            self._find_base().metrics.remove_adapter(name)
            self._loaded_model.llm.remove_adapter(name)
        self.threads.close()

    def _prepare_transcripts(self, submissions: Sequence[PromptSubmission]) -> list[Any]:
        name = self.settings.model_names[0]
        named = [replace(each, options=replace(each.options, adapter=name)) for each in submissions]
        return super()._prepare_transcripts(named)


@dataclass(frozen=True)
class AdapterLoader:
    """Loader of an adapter into the LLM of its base."""

    name: str
    folder: str

    def load(self, share: KVShare, base: "LLM | None") -> "LLM":
        """Add the adapter to the base, and return the base.

        Raises:
            ForedraftError: the adapter does not fit, or the base takes none by request.
        """
        assert base is not None, "an adapter is loaded after its base"
        try:
            base.add_adapter(self.name, self.folder)
        except ForedraftError as error:
            raise ForedraftError(
                f"{error}; or let the server merge it into a model of its own, with a weight: "
                "--lora NAME=FOLDER,weight=1"
            ) from None
        return base
