"""Facts about a target from its config.json: enough to check a drafter without loading the model."""

from dataclasses import dataclass

from transformers import AutoConfig

from foredraft.checkpoints.schema import TargetInfo
from foredraft.errors import ForedraftError
from foredraft.files import hub
from foredraft.files.file_checks import read_json

MAX_REASON_LENGTH = 160  # characters of an error of transformers that are repeated


@dataclass(frozen=True)
class ExportTarget:
    """Sizes and architectures of a target."""

    info: TargetInfo
    architectures: tuple[str, ...]


def read_target(name: str) -> ExportTarget:
    """Read the facts of a target.

    Args:
        name: Folder or hub id.

    Raises:
        ForedraftError: if there is no language model of that name that transformers can load.
    """
    folder = hub.find_folder(name, ["config.json"])
    read_json(folder / "config.json", name, "a model folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        text = config.get_text_config()
        facts = TargetInfo(name, int(text.hidden_size), int(text.vocab_size), int(text.num_hidden_layers))
    except Exception as error:  # transformers raises dozens of kinds
        first = str(error).strip().partition("\n")[0]
        raise ForedraftError(
            f"{name} is no language model that transformers supports ({first[:MAX_REASON_LENGTH]})"
        ) from None
    return ExportTarget(facts, tuple(config.architectures or ()))
