"""The facts about a target that its config.json tells: enough to check a drafter without loading the model."""

from dataclasses import dataclass

from transformers import AutoConfig

from foredraft.checkpoints import hub
from foredraft.checkpoints.file_checks import read_json
from foredraft.checkpoints.schema import TargetInfo
from foredraft.errors import ForedraftError


@dataclass(frozen=True)
class ExportTarget:
    info: TargetInfo
    architectures: tuple[str, ...]


def read_target(name: str) -> ExportTarget:
    """A target by folder or hub id. Raises ForedraftError."""
    folder = hub.find_folder(name, ["config.json"])
    read_json(folder / "config.json", name, "a model folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        text = config.get_text_config()
        facts = TargetInfo(name, int(text.hidden_size), int(text.vocab_size), int(text.num_hidden_layers))
    except Exception as error:  # transformers raises dozens of kinds
        first = str(error).strip().partition("\n")[0]
        raise ForedraftError(f"{name} is no language model that transformers knows ({first[:160]})") from None
    return ExportTarget(facts, tuple(config.architectures or ()))
