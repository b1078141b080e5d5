"""Location of a checkpoint: a local folder, or the cache of the Hugging Face hub."""

from pathlib import Path

from foredraft.errors import ForedraftError

GGUF_HINT = "give the folder of the safetensors model that it was made from"
DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.pt", "*.bin"]
TOKENIZER_PATTERNS = ["*.txt", "*.model", "*.jinja"]  # files of a tokenizer and its chat template, besides *.json
MAX_REASON_LENGTH = 200  # characters of an unknown error message that are repeated
IGNORED_PATTERNS = ["*optimizer*", "training_args.bin", "training_state.pt", "*/*"]
# Errors of a hub that gave no answer, by class name: the hub's HTTP library differs between its versions.
UNREACHABLE_ERRORS = ("ConnectError", "ConnectTimeout", "OfflineModeIsEnabled")


def find_revision(name: str, revision: str | None) -> str:
    """Return the folder of a hub id at a revision, in the cache or downloaded; without a revision, the name itself.

    Args:
        name: Hub id.
        revision: Branch, tag or commit; None = what the caller finds by the name.

    Raises:
        ForedraftError: if the name is a local folder, or the revision does not exist or cannot be downloaded.
    """
    if revision is None:
        return name
    if not isinstance(revision, str) or not revision:
        raise ForedraftError(f"a revision is a branch, tag or commit of a hub id, got {revision!r}")
    if Path(name).expanduser().exists():
        raise ForedraftError(f"{name} is a local folder, which has no revisions; leave revision {revision!r} out")
    return str(find_folder(name, [*DOWNLOAD_PATTERNS, *TOKENIZER_PATTERNS], revision))


def find_folder(name: str, patterns: list[str] | None = None, revision: str | None = None) -> Path:
    """Return the local folder of a path or hub id; a model that is not in the cache is downloaded.

    Args:
        name: Path or hub id.
        patterns: File patterns to download; None = weights and JSON files.
        revision: Branch, tag or commit of a hub id; None = the default branch.

    Raises:
        ForedraftError: if the name is a file, does not exist, or cannot be downloaded.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ForedraftError(explain_file(name, path))
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ForedraftError(f"{name} does not exist; give a drafter's folder or a hub id such as org/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns or DOWNLOAD_PATTERNS,
                ignore_patterns=IGNORED_PATTERNS,
            )
        )
    except Exception as error:  # the hub raises dozens of kinds
        raise _convert_hub_error(name if revision is None else f"{name} (revision {revision})", error) from None


def check_reachable(name: str, file: str) -> None:
    """Check that a file of a hub id is in the cache or that the hub answers; one request, not repeated.

    Without this check a mistyped folder without a network costs 23 s: the hub's library repeats the request for a file
    that is not in the cache five times. An answer of the hub, whatever it says, is left to the caller.

    Args:
        name: Hub id.
        file: File that every model of the caller's kind has.

    Raises:
        ForedraftError: if the file is not in the cache and the hub cannot be reached.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if try_to_load_from_cache(name, file) is None:
            get_hf_file_metadata(hf_hub_url(name, file))
    except Exception as error:  # the hub raises dozens of kinds
        if type(error).__name__ in UNREACHABLE_ERRORS:
            raise make_fetch_error(name) from None


def explain_file(name: str, path: Path) -> str:
    """Explain how to replace a file that was given instead of a folder."""
    if path.suffix.lower() == ".gguf":
        return f"{name} is a GGUF file, which is read only as a model that runs in one process; here {GGUF_HINT}"
    return f"{name} is a file; give the folder that holds config.json and the weights"


def explain_folder(folder: Path, expected_kind: str) -> str:
    """Explain what a folder of another kind holds, and how to use its content."""
    packed = sorted(file.name for file in folder.glob("*.gguf"))
    if packed:
        return f"it holds {packed[0]}, and GGUF files are read only as models that run in one process: here {GGUF_HINT}"
    if (folder / "adapter_config.json").exists():
        return (
            "it holds an adapter (LoRA): merge it into its base model first (PEFT's merge_and_unload, then "
            "save_pretrained), and give that folder; or serve it with foredraft serve --lora"
        )
    return f"it is not {expected_kind}"


def make_fetch_error(name: str) -> ForedraftError:
    """Return the error for a name that is neither local nor reachable."""
    return ForedraftError(
        f"{name} is not in the local cache and could not be fetched; check the name or the network "
        "(and there is no such folder)"
    )


def _convert_hub_error(name: str, error: Exception) -> ForedraftError:
    text = f"{type(error).__name__}: {error}".lower()
    if any(word in text for word in ("gated", "401 client", "403 client")):
        return ForedraftError(
            f"{name} is gated or private: ask for access on its page, then log in with `hf auth login`"
        )
    if "revisionnotfound" in text:
        return ForedraftError(f"{name} does not exist on the hub; give one of its branches, tags or commits")
    if any(word in text for word in ("repositorynotfound", "404 client", "hfvalidation")):
        return ForedraftError(f"{name} is neither a local folder nor a model on the hub; check the spelling")
    if any(word in text for word in ("connect", "offline", "locate", "localentrynotfound", "resolve")):
        return make_fetch_error(name)
    first = str(error).strip().partition("\n")[0]
    return ForedraftError(f"{name} could not be fetched ({type(error).__name__}: {first[:MAX_REASON_LENGTH]})")
