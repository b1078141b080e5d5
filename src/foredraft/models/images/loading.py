"""Loading of the processor of a vision-language model, and refusals of models that cannot be served with images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoProcessor

from foredraft.errors import ForedraftError
from foredraft.files.gguf import find_gguf
from foredraft.image_files import ImageLimits, import_pillow
from foredraft.models.attention import read_implementations
from foredraft.models.hf import HFModel
from foredraft.models.images.encoder import ImageEncoder
from foredraft.models.images.families import REFUSED_FAMILIES, TESTED_FAMILIES
from foredraft.models.loading_errors import summarise_error

OPTION = "max_images"
REMEDY = f"leave {OPTION} out to use it with text alone"


def check_image_options(model: Any, max_images: int, tensor_parallel_size: int) -> None:
    """Check the options of a target that is loaded with its image part.

    Args:
        model: folder, hub id, file or loaded model, as given to `LLM`.
        max_images: images per request at most; 0 = the image part is not loaded.
        tensor_parallel_size: processes of the target.

    Raises:
        ForedraftError: `max_images` is no number, or an option excludes images.
    """
    if not isinstance(max_images, int) or isinstance(max_images, bool) or max_images < 0:
        raise ForedraftError(f"{OPTION} is a number of images per request from 0 up, got {max_images!r:.80}")
    if not max_images:
        return
    import_pillow()
    if not isinstance(model, str | Path) or find_gguf(str(model)) is not None:
        raise ForedraftError(f"{OPTION} needs the processor of the model; give the folder or hub id of the model")
    if tensor_parallel_size > 1:
        raise ForedraftError(f"images are read by a target in one process; leave {OPTION} or tensor_parallel_size out")


def wrap_with_images(model: Any, wrap: Callable[[], HFModel], folder: str, max_images: int) -> HFModel:
    """Wrap a loaded model as a target that reads images.

    Args:
        model: whole transformers model.
        wrap: wraps it.
        folder: folder or hub id of the model.
        max_images: images per request at most.

    Raises:
        ForedraftError: the model cannot be wrapped or served with images, or has no processor.
    """
    implementations = read_implementations(model)  # before they are replaced
    processor = load_processor(folder)
    target = wrap()
    add_image_encoder(target, processor, implementations, max_images)
    return target


def add_image_encoder(target: HFModel, processor: Any, implementations: dict[str, str], max_images: int) -> None:
    """Give a target an image encoder.

    Args:
        target: wrapped model, loaded with its image part.
        processor: its processor.
        implementations: the attention of the model before it was wrapped, as of `read_implementations`.
        max_images: images per request at most.

    Raises:
        ForedraftError: the model cannot be served with images.
    """
    _check_model(target)
    limits = ImageLimits(max_images)
    encoder = ImageEncoder(target.model, processor, target.name, limits, implementations, target.modules_lock)
    encoder.examine()
    target.image_encoder = encoder


def _check_model(target: HFModel) -> None:
    config, obstacle = target.model.config, None
    kind = config.model_type
    if target.has_encoder:
        obstacle = "it is an encoder-decoder model"
    elif config.get_text_config() is config:
        obstacle = "it reads text alone"
    elif kind in REFUSED_FAMILIES:
        obstacle = REFUSED_FAMILIES[kind]
    elif kind not in TESTED_FAMILIES:
        obstacle = (
            f"models of type {kind} were not compared with transformers; use {', '.join(sorted(TESTED_FAMILIES))}"
        )
    elif not target.runs_native:
        obstacle = target.module_pass.image_obstacle
    if obstacle is not None:
        raise ForedraftError(f"{target.name} cannot be served with images: {obstacle}; {REMEDY}")


def load_processor(name: str) -> Any:
    """Load the processor of a folder or hub id.

    Raises:
        ForedraftError: there is none, a package is missing that it needs, or it has no placeholder for images.
    """
    try:
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=False)
    except ImportError as error:
        raise ForedraftError(
            f"the processor of {name} needs a package that is missing ({summarise_error(error)}); install it, or "
            f"{REMEDY}"
        ) from error
    except Exception as error:  # transformers and the hub raise dozens of kinds
        raise ForedraftError(
            f"the processor of {name} could not be loaded ({summarise_error(error)}); fetch preprocessor_config.json "
            f"and processor_config.json again, or {REMEDY}"
        ) from error
    if getattr(processor, "image_token", None) is None:  # a tokenizer alone, or a processor without a placeholder
        raise ForedraftError(f"the processor of {name} has no placeholder for images; {REMEDY}")
    return processor
