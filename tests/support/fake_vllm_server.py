"""An HTTP server that answers as vLLM 0.32 with ExampleHiddenStatesConnector does, over a small model.

`tests/vllm/test_hidden_states.py` checks vLLM itself. Hidden states are those of transformers, texts those of an `LLM`.
"""

import contextlib
import fcntl
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from foredraft import LLM, Sampling

PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
WRITE_SECONDS = 0.01  # after the response, as in vLLM


@dataclass
class FakeVllm:
    """Model, folder and exported layers of the server; tests change the fields."""

    model: str
    folder: Path
    exports: tuple[int, ...]
    has_connector: bool = True
    owner: str = "vllm"
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    pass_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.llm = LLM(self.model, None)
        self.network = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()

    def list_models(self) -> dict[str, Any]:
        card = {"id": self.model, "object": "model", "owned_by": self.owner, "root": self.model, "max_model_len": 64}
        return {"object": "list", "data": [card]}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        self.requests.append(body)
        assert body["model"] == self.model
        assert len(ids) + body["max_tokens"] <= 64
        hidden, logits = self._run(ids)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
        if body.get("return_token_ids"):
            assert PLAIN.items() <= body.items()
            sampling = Sampling(max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
            [output] = self.llm.generate([ids], sampling)
            choice |= {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [None, *(list_logprobs(row) for row in logits.log_softmax(-1)[:-1])]
        params = {"hidden_states_path": self._start_writing(ids, hidden)} if self.has_connector else None
        return {"object": "text_completion", "choices": [choice], "kv_transfer_params": params}

    def _run(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states [T, L, H] of the exported layers and the logits [T, V]."""
        inputs: list[torch.Tensor] = []
        with self.pass_lock, torch.no_grad():
            hook = self.network.model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
            output = self.network(torch.tensor([ids]), output_hidden_states=True)
            hook.remove()
        states = [*output.hidden_states[:-1], inputs[0]]  # transformers' last one is normalised
        return torch.stack([states[layer][0] for layer in self.exports], 1), output.logits[0]

    def _start_writing(self, ids: list[int], hidden: torch.Tensor) -> str:
        """Lock the file, and write it later in another thread."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"cmpl-{len(self.requests)}-{threading.get_ident()}.safetensors"
        lock = Path(f"{path}.lock").open("w")  # noqa: SIM115 - another thread closes it
        fcntl.flock(lock, fcntl.LOCK_EX)

        def write() -> None:
            time.sleep(WRITE_SECONDS)
            save_file({"hidden_states": hidden.contiguous(), "token_ids": torch.tensor(ids)}, path)
            lock.close()

        threading.Thread(target=write).start()
        return str(path)


def list_logprobs(row: torch.Tensor) -> dict[str, Any]:
    """Return the likeliest token and another one as vLLM's prompt_logprobs has them."""
    best = int(row.argmax())
    other = (best + 1) % len(row)
    ranks = {best: 1, other: 2}
    return {str(token): {"logprob": float(row[token]), "rank": rank} for token, rank in ranks.items()}


@contextlib.contextmanager
def run_fake_vllm(model: str, folder: Path, exports: tuple[int, ...]) -> Iterator[FakeVllm]:
    """Run the server on a free port."""
    fake = FakeVllm(model, folder, exports)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_json(200 if self.path == "/v1/models" else 404, fake.list_models())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_json(200, fake.complete(body))

        def send_json(self, status: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
