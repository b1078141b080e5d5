"""A `foredraft serve --traces` that runs the target."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foredraft.drafters.losses import TargetLogProbs
from foredraft.errors import ForedraftError
from foredraft.models.hf import HFModel
from foredraft.outputs import Completion
from foredraft.sampling.params import Sampling
from foredraft.train.fingerprint import fingerprint_target
from foredraft.train.remote.client import TargetClient
from foredraft.train.remote.completions import COMPLETIONS_PATH, make_body, parse_completion
from foredraft.train.remote.wire import decode_traces

TRACES_PATH = "/v1/traces"


@dataclass(frozen=True)
class ForedraftServer:
    """Server of this project, which computes the distributions too; methods as in `TargetServer`."""

    client: TargetClient

    @property
    def max_context(self) -> int | None:
        return None

    def check_target(self, target: HFModel, name: str) -> None:
        served, own = self.client.get_json(TRACES_PATH)["target"], fingerprint_target(target)
        if served != own:
            differing = next(key for key in own if served.get(key) != own[key])
            raise ForedraftError(
                f"{self.client.url} serves another target than {name}: its {differing} is {served.get(differing)}, "
                f"here it is {own[differing]}; give the --model that the server has"
            )

    def fetch_traces(
        self, target: HFModel, tokens: Tensor, hidden_layers: Sequence[int], top: int | None
    ) -> tuple[Tensor, TargetLogProbs]:
        body = {"tokens": tokens.tolist(), "hidden_layers": list(hidden_layers), "top": top}
        features, probs = decode_traces(self.client.post(TRACES_PATH, body))
        ids = None if probs.token_ids is None else probs.token_ids.to(target.device)
        return features.to(target.device), TargetLogProbs(probs.logprobs.to(target.device), ids)

    def complete(self, ids: list[int], sampling: Sampling) -> Completion:
        response = self.client.post_json(COMPLETIONS_PATH, make_body(ids, sampling))
        return parse_completion(self.client.url, ids, response)
