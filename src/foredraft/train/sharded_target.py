"""Target whose decoder layers are sharded over the processes of a run; each layer is gathered when it runs."""

from typing import Any

import torch

from foredraft import zoo
from foredraft.errors import ForedraftError
from foredraft.llm import LLM
from foredraft.models.hidden_states import find_decoder_layers
from foredraft.models.loading import load_model, load_tokenizer
from foredraft.models.wrap import wrap_model
from foredraft.train.distributed import DistributedContext
from foredraft.train.placement import make_mesh, shard_module
from foredraft.train.sharding_settings import ShardingSettings


def load_sharded_target(
    name: str, dtype: str | torch.dtype, distributed: DistributedContext, settings: ShardingSettings
) -> LLM:
    """Load a target, of whose layers every process keeps a part.

    Embedding, final norm and head stay whole, because drafters read them. All processes must run the same passes.

    Args:
        name: built-in target, folder or hub id.
        dtype: dtype of the weights; "auto" = as stored.
        distributed: processes of the run.
        settings: how the weights are shared.

    Raises:
        ForedraftError: the model cannot be loaded or has an encoder.
    """
    builtin = zoo.resolve_target(name)
    folder = name if builtin is None else str(zoo.find_target_folder(builtin))
    model = load_model(folder, dtype, torch.device("cpu"), is_text_only=True)
    if model.config.is_encoder_decoder:
        raise ForedraftError(f"{name} is an encoder-decoder model, which is not sharded; launch without --use_fsdp")
    _shard_layers(model, distributed, settings)
    model.to(distributed.device)
    target = wrap_model(model, folder)
    return LLM(target, None, tokenizer=load_tokenizer(folder, target.vocab_size))


def _shard_layers(model: Any, distributed: DistributedContext, settings: ShardingSettings) -> None:
    model.requires_grad_(False)
    mesh = make_mesh(distributed)
    for layer in find_decoder_layers(model):
        sharded = shard_module(layer, mesh, settings)
        sharded.unshard()  # outside of inference mode, whose tensors could not be written to in training
        sharded.reshard()
