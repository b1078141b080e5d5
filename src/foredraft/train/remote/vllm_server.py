"""A vLLM that runs the target: hidden states in files of a shared folder, texts by HTTP.

vLLM writes the states of every request. The distributions are computed here, by the target's final norm and head.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.drafters.losses import TargetLogProbs
from foredraft.errors import ForedraftError
from foredraft.models.forward_batch import AFTER_FINAL_NORM
from foredraft.models.hf import HFModel
from foredraft.models.truncated_modules import find_final_norm
from foredraft.outputs import Completion
from foredraft.sampling.params import Sampling
from foredraft.train.remote.client import TargetClient
from foredraft.train.remote.completions import COMPLETIONS_PATH, make_body, parse_completion
from foredraft.train.remote.vllm_export import DEFAULT_FOLDER, list_exports, make_vllm_command, parse_folder
from foredraft.train.remote.vllm_states import delete_states, take_states

# vLLM would take defaults from generation_config.json, and the texts would not have the target's distribution.
PLAIN_SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
NUM_REQUESTS = 32  # rows that are requested at the same time
LOGIT_BYTES = 128 << 20  # limit of the float32 logits that are computed at once
CHECK_IDS = range(0, 256, 16)  # tokens of the check, which every vocabulary has
MAX_DEVIATION = 0.25  # nats; the mean of bfloat16's rounding is below, that of another target above


@dataclass(frozen=True)
class VllmServer:
    """Server of vLLM with ExampleHiddenStatesConnector; methods as in `TargetServer`.

    Attributes:
        client: client of the server.
        model: name of the served model.
        max_length: longest sequence in tokens, prompt and output together.
    """

    client: TargetClient
    model: str
    max_length: int

    @classmethod
    def from_card(cls, client: TargetClient, card: Mapping[str, Any]) -> "VllmServer":
        """Make it from its entry in /v1/models."""
        return cls(client, str(card["id"]), int(card["max_model_len"]))

    @property
    def max_context(self) -> int | None:
        return self.max_length - 1  # every request generates a token

    def check_target(self, target: HFModel, name: str) -> None:
        ids = [token % target.vocab_size for token in CHECK_IDS][: self.max_context]
        response = self._send(self._make_trace_body(ids) | {"prompt_logprobs": 1})
        states = self._take_row(target, ids, list_exports((), target.num_layers), response)
        own = _compute_probs(target, _normalise(target, states[:, -1]), None).logprobs
        served = (response["choices"][0].get("prompt_logprobs") or [])[1:]  # none before the first token
        differences = [
            abs(float(own[i, int(token)]) - entry["logprob"]) if int(token) < target.vocab_size else math.inf
            for i, entries in enumerate(served)
            for token, entry in entries.items()
            if entry["rank"] == 1
        ]
        deviation = sum(differences) / len(differences) if differences else math.inf
        if not deviation <= MAX_DEVIATION:
            raise ForedraftError(
                f"{self.client.url} serves another target than {name}: the log-probabilities of vLLM differ by "
                f"{deviation:.2f} from those of the final norm and head of {name}; give the --model that the server has"
            )

    @torch.no_grad()
    def fetch_traces(
        self, target: HFModel, tokens: Tensor, hidden_layers: Sequence[int], top: int | None
    ) -> tuple[Tensor, TargetLogProbs]:
        exports = list_exports(hidden_layers, target.num_layers)
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            rows = list(pool.map(partial(self._fetch_row, target, exports), tokens.tolist()))
        states = torch.stack(rows)  # [B, L, layers, H]
        normed = _normalise(target, states[:, :, -1])
        parts = [normed if layer == AFTER_FINAL_NORM else states[:, :, exports.index(layer)] for layer in hidden_layers]
        features = torch.cat(parts, -1) if parts else normed[..., :0]
        return features, _compute_probs(target, normed, top)

    def complete(self, ids: list[int], sampling: Sampling) -> Completion:
        response = self._send(make_body(ids, sampling) | PLAIN_SAMPLING)
        path = _find_path(response)
        if path is not None and _is_ours(path):
            delete_states(path)
        return parse_completion(self.client.url, ids, response)

    def _fetch_row(self, target: HFModel, exports: tuple[int, ...], ids: list[int]) -> Tensor:
        return self._take_row(target, ids, exports, self._send(self._make_trace_body(ids)))

    def _make_trace_body(self, ids: list[int]) -> dict[str, Any]:
        return {"prompt": ids, "max_tokens": 1, "temperature": 0.0}

    def _send(self, body: dict[str, Any]) -> Any:
        return self.client.post_json(COMPLETIONS_PATH, {"model": self.model, **body})

    def _take_row(self, target: HFModel, ids: list[int], exports: tuple[int, ...], response: Any) -> Tensor:
        """Read the states [T, layers, H] of a row at these boundaries from the file that the response names."""
        path = _find_path(response)
        refuse = partial(self._refuse, target, exports, path)
        if path is None:
            raise refuse("writes no hidden states")
        if not _is_ours(path):
            raise refuse(f"writes to {Path(path).parent}, whose name has no layers")
        layers = parse_folder(Path(path).parent.name) or ()
        row = take_states(path)
        if missing := sorted(set(exports) - set(layers)):
            raise refuse(f"exports the layers {_join(layers)}, and this run also reads {_join(missing)}")
        if row.states.shape != (len(ids), len(layers), target.hidden_size):
            raise refuse(
                f"exports states of shape {list(row.states.shape)} instead of "
                f"{[len(ids), len(layers), target.hidden_size]}; it has another target, or other layers than its folder"
            )
        if row.token_ids != tuple(ids):
            raise ForedraftError(f"{path} holds the states of other tokens than were sent; see the log of vLLM")
        index = [layers.index(layer) for layer in exports]
        return row.states[:, index].to(target.device, target.embedding.dtype)

    def _refuse(self, target: HFModel, exports: tuple[int, ...], path: str | None, reason: str) -> ForedraftError:
        folder = str(Path(path).parent.parent) if path is not None and _is_ours(path) else DEFAULT_FOLDER
        command = make_vllm_command(target.name, exports, folder)
        return ForedraftError(f"the vLLM at {self.client.url} {reason}; start it as: {command}")


def _find_path(response: Any) -> str | None:
    """Return the path of the file of states in a response; None without one."""
    path = (response.get("kv_transfer_params") or {}).get("hidden_states_path")
    return None if path is None else str(path)


def _is_ours(path: str) -> bool:
    """Return whether a path is that of a file for a trainer. No other file is deleted."""
    return Path(path).suffix == ".safetensors" and parse_folder(Path(path).parent.name) is not None


def _join(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


@torch.no_grad()
def _normalise(target: HFModel, states: Tensor) -> Tensor:
    """Apply the final norm to states [.., H] of the last layer."""
    norm: nn.Module | None = find_final_norm(target.model)
    if norm is None:
        raise ForedraftError(
            f"{target.name} has no recognisable norm before its head, so the states of vLLM give no distribution; use "
            "`foredraft serve --traces`"
        )
    apply: Callable[[Tensor], Tensor] = norm
    return apply(states)


@torch.no_grad()
def _compute_probs(target: HFModel, normed: Tensor, top: int | None) -> TargetLogProbs:
    """Compute distributions [.., k or V] from states [.., H] after the final norm."""
    rows = normed.flatten(0, -2)
    size = max(1, LOGIT_BYTES // (4 * target.vocab_size))
    pieces = [rows[start : start + size] for start in range(0, len(rows), size)]
    parts = [TargetLogProbs.from_logits(target.compute_logits(piece), top) for piece in pieces]
    shape = (*normed.shape[:-1], -1)
    ids = [part.token_ids for part in parts if part.token_ids is not None]
    return TargetLogProbs(
        torch.cat([part.logprobs for part in parts]).view(shape), torch.cat(ids).view(shape) if ids else None
    )
