"""Names under which targets store their MTP layers."""

from collections.abc import Collection
from dataclasses import dataclass, replace

EMBEDDING_NORM, STATE_NORM, PROJECTION, OUTPUT_NORM = "embedding_norm", "state_norm", "projection", "output_norm"


@dataclass(frozen=True)
class Spelling:
    """Stored names of one family. `{n}` stands for the number of the target's decoder layers.

    Attributes:
        name: family, for messages.
        parts: stored name of each part by internal name; a family without an output norm has none.
        layer: prefix of the decoder layer's tensors.
        puts_state_first: as in `MtpShape`.
        zeroes_first: as in `MtpShape`; vLLM does so for these families.
        model_types: families of transformers whose targets are published so; Qwen's names serve all others.
        count_key: key of config.json with the number of layers.
        copies: names below the layer's prefix that are copies of the target's weights, and are not read.
    """

    name: str
    parts: dict[str, str]
    layer: str
    puts_state_first: bool = False
    zeroes_first: bool = False
    model_types: tuple[str, ...] = ()
    count_key: str = "num_nextn_predict_layers"
    copies: tuple[str, ...] = ()

    @property
    def flags(self) -> dict[str, bool]:
        """Flags of `MtpShape` that the family means."""
        return {
            "puts_state_first": self.puts_state_first,
            "zeroes_first": self.zeroes_first,
            "has_output_norm": OUTPUT_NORM in self.parts,
        }

    def fill(self, num_layers: int) -> "Spelling":
        """Return the spelling for a target with this number of decoder layers."""
        parts = {part: name.format(n=num_layers) for part, name in self.parts.items()}
        layer = self.layer.format(n=num_layers)
        return replace(self, parts=parts, layer=layer)


QWEN = Spelling(
    "Qwen",  # also EXAONE and Mellum
    {
        EMBEDDING_NORM: "mtp.pre_fc_norm_embedding.weight",
        STATE_NORM: "mtp.pre_fc_norm_hidden.weight",
        PROJECTION: "mtp.fc.weight",
        OUTPUT_NORM: "mtp.norm.weight",
    },
    "mtp.layers.0.",
    count_key="mtp_num_hidden_layers",
)
DEEPSEEK = Spelling(
    "DeepSeek",  # also GLM
    {
        EMBEDDING_NORM: "model.layers.{n}.enorm.weight",
        STATE_NORM: "model.layers.{n}.hnorm.weight",
        PROJECTION: "model.layers.{n}.eh_proj.weight",
        OUTPUT_NORM: "model.layers.{n}.shared_head.norm.weight",
    },
    "model.layers.{n}.",
    zeroes_first=True,
    model_types=("deepseek_v3", "glm4_moe"),
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
MIMO = Spelling(
    "MiMo",
    {
        EMBEDDING_NORM: "model.mtp_layers.0.token_layernorm.weight",
        STATE_NORM: "model.mtp_layers.0.hidden_layernorm.weight",
        PROJECTION: "model.mtp_layers.0.input_proj.weight",
        OUTPUT_NORM: "model.mtp_layers.0.final_layernorm.weight",
    },
    "model.mtp_layers.0.",
    puts_state_first=True,
    zeroes_first=True,
)
ERNIE = Spelling(
    "Ernie",
    {
        EMBEDDING_NORM: "model.mtp_emb_norm.0.weight",
        STATE_NORM: "model.mtp_hidden_norm.0.weight",
        PROJECTION: "model.mtp_linear_proj.0.weight",
    },
    "model.mtp_block.0.",
    zeroes_first=True,
    model_types=("ernie4_5_moe",),
)
SPELLINGS = (QWEN, DEEPSEEK, MIMO, ERNIE)


def find_spelling(names: Collection[str], num_layers: int) -> Spelling | None:
    """Return the spelling of the MTP layer among stored names; None if there is none."""
    filled = (spelling.fill(num_layers) for spelling in SPELLINGS)
    return next((spelling for spelling in filled if spelling.parts[PROJECTION] in names), None)


def choose_spelling(model_type: str) -> Spelling:
    """Return the spelling in which targets of a family of transformers are published."""
    return next((spelling for spelling in SPELLINGS if model_type in spelling.model_types), QWEN)
