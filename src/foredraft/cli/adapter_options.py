"""Options for LoRA adapters that requests name, of the commands with one model."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from foredraft.cli.options import ModelOptions, _make_option
from foredraft.cli.shell import UsageError

if TYPE_CHECKING:
    from foredraft.request_options import RequestOptions

ADAPTER_PANEL = "Model"


@dataclass(frozen=True)
class AdapterOptions(ModelOptions):
    """LoRA adapters beside the model, whose weights stay as they are."""

    lora: Annotated[
        list[str] | None,
        _make_option(
            "LoRA adapter of the model, a folder of PEFT; repeatable.",
            "--lora",
            "--lora-modules",
            panel=ADAPTER_PANEL,
            metavar="NAME=FOLDER",
        ),
    ] = None
    adapter: Annotated[
        str | None,
        _make_option("Name of the adapter to use. Default: the only one of --lora.", panel=ADAPTER_PANEL),
    ] = None

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Folders of --lora by name. Raises UsageError for another form, or a name that is given twice."""
        folders: dict[str, str] = {}
        for text in self.lora or ():
            name, equals, folder = text.partition("=")
            if not equals or not name.strip() or not folder.strip():
                raise UsageError(f"--lora takes NAME=FOLDER, got {text!r}")
            if name.strip() in folders:
                raise UsageError(f"--lora gives the name {name.strip()!r} twice; give each adapter its own")
            folders[name.strip()] = folder.strip()
        return folders

    @property
    def chosen_adapter(self) -> str | None:
        """Name of the adapter to use; None = the model itself. Raises UsageError for an unknown or missing name."""
        names = list(self.adapter_folders)
        if self.adapter is None:
            if len(names) > 1:
                raise UsageError(f"--lora gives several adapters; choose one with --adapter: {', '.join(names)}")
            return names[0] if names else None
        if self.adapter not in names:
            raise UsageError(
                f"--adapter {self.adapter}: --lora gives no adapter of this name; add --lora {self.adapter}=FOLDER"
            )
        return self.adapter

    def build_request_options(self, prediction: str = "") -> "RequestOptions":
        """Return the options of a request, with the chosen adapter."""
        return replace(super().build_request_options(prediction), adapter=self.chosen_adapter)
