"""Where a checkpoint lies: a folder, or the hub's cache."""

from pathlib import Path

from foredraft.errors import ForedraftError

GGUF = (
    "give the folder of the safetensors model that it was made from, or convert it with transformers "
    "(from_pretrained(folder, gguf_file=name), then save_pretrained)"
)
WANTED = ["*.json", "*.safetensors", "*.pt", "*.bin"]
UNWANTED = ["*optimizer*", "training_args.bin", "training_state.pt", "*/*"]


def find(name: str, wanted: list[str] | None = None) -> Path:
    """The local folder of a path or hub id, fetched where it is not in the cache. Raises ForedraftError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ForedraftError(file_instead(name, path))
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ForedraftError(f"{name} does not exist; give a drafter's folder or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=wanted or WANTED, ignore_patterns=UNWANTED))
    except Exception as error:  # the hub raises dozens of kinds
        raise _reason(name, error) from None


def file_instead(name: str, path: Path) -> str:
    """What to do about a file that was given for a folder."""
    if path.suffix.lower() == ".gguf":
        return f"{name} is a GGUF file, which is not read; {GGUF}"
    return f"{name} is a file; give the folder that holds config.json and the weights"


def unreadable(folder: Path, kind: str) -> str:
    """What lies in a folder that is not of the kind wanted, and what to do with it."""
    packed = sorted(file.name for file in folder.glob("*.gguf"))
    if packed:
        return f"it holds {packed[0]}, and GGUF files are not read: {GGUF}"
    if (folder / "adapter_config.json").exists():
        return (
            "it holds an adapter (LoRA): merge it into its base model first (PEFT's merge_and_unload, then "
            "save_pretrained), and give that folder"
        )
    return f"it is not {kind}"


def not_fetched(name: str) -> ForedraftError:
    """A name that is neither here nor within reach."""
    return ForedraftError(
        f"{name} is not in the local cache and could not be fetched; check the name or the network "
        "(and there is no such folder)"
    )


def _reason(name: str, error: Exception) -> ForedraftError:
    text = f"{type(error).__name__}: {error}".lower()
    if any(word in text for word in ("gated", "401 client", "403 client")):
        return ForedraftError(
            f"{name} is gated or private: ask for access on its page, then log in with `hf auth login`"
        )
    if any(word in text for word in ("repositorynotfound", "404 client", "hfvalidation")):
        return ForedraftError(f"{name} is neither a local folder nor a model on the hub; check the spelling")
    if any(word in text for word in ("connect", "offline", "locate", "localentrynotfound", "resolve")):
        return not_fetched(name)
    first = str(error).strip().partition("\n")[0]
    return ForedraftError(f"{name} could not be fetched ({type(error).__name__}: {first[:200]})")
