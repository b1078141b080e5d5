"""A stand-in for the server's endpoints: it streams scripted passes, so that every token and every tree is fixed."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from foredraft.server.playground import make_playground_router

Chunk = dict[str, Any]
ENDLESS = "endless"  # prompt of a stream without an end
EVIL = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"


def chunk(origins: list[str], pieces: list[str], steps: list[dict[str, Any]]) -> Chunk:
    trace = {"origins": origins, "pieces": pieces, "steps": steps}
    choice = {"index": 0, "text": "".join(pieces), "finish_reason": None, "foredraft_trace": trace}
    return {"choices": [choice]}


def step(parents: list[int], pieces: list[str], accepted: list[int], num_emitted: int) -> dict[str, Any]:
    ids = list(range(len(pieces)))
    return {
        "tokens": ids,
        "parents": parents,
        "pieces": pieces,
        "accepted": accepted,
        "emitted": list(range(100, 100 + num_emitted)),
    }


def plain_pass(piece: str) -> Chunk:
    return chunk(["plain"], [piece], [step([-1], ["?"], [0], 1)])


def chain_pass(root: str, kept: list[str], rejected: list[str], own: str) -> Chunk:
    """Make a pass with a chain of drafts, `kept` then `rejected`, and the target's own token."""
    drafts = [*kept, *rejected]
    origins = ["accepted"] * len(kept) + ["corrected" if rejected else "bonus"]
    tree = step(list(range(-1, len(drafts))), [root, *drafts], list(range(len(kept) + 1)), len(kept) + 1)
    return chunk(origins, [*kept, own], [tree])


def tree_pass() -> Chunk:
    """Two branches of three and a sibling: the second branch is kept to depth 2."""
    tree = step(
        [-1, 0, 0, 0, 1, 2, 2, 4, 5],
        [" return", " None", " sum", " 0", "\n", "(", ".", "\n", "values"],
        [0, 2, 5],
        3,
    )
    return chunk(["accepted", "accepted", "corrected"], [" sum", "(", "x"], [tree])


SCRIPTS: dict[str, list[Chunk]] = {
    "origins": [
        plain_pass("def"),
        chain_pass("def", [" mean", "("], [], "values"),
        chain_pass("values", [")"], [" ->", " int"], ":\n"),
        chain_pass(":\n", [], ["    pass", "\n"], "    return"),
        tree_pass(),
    ],
    "trailing": [plain_pass("def"), chain_pass("def", [" mean"], ["("], ":"), plain_pass("\n")],
    "evil": [plain_pass(EVIL), chain_pass(EVIL, [EVIL], [EVIL + "2"], EVIL)],
    "broken": [plain_pass("so far"), {"error": {"message": "the model returned\n invalid logits", "code": 500}}],
    "untraced": [{"choices": [{"index": 0, "text": "no trace", "finish_reason": None}]}],
}


@dataclass
class FakeServer:
    """Recorded requests and the application."""

    bodies: list[Chunk] = field(default_factory=list)
    running: int = 0
    key: str | None = None

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(make_playground_router())
        app.get("/v1/models")(self.models)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/chat/completions")(self.complete)
        return app

    def _refusal(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "the API key is missing or wrong"}}, 401)

    async def models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"data": [{"id": "fake-model", "drafter": "ngram"}]})

    async def complete(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if body["max_tokens"] < 1:
            return JSONResponse({"error": {"message": "max_tokens must be at least 1, got 0"}}, 400)
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        is_plain = body.get("speculative") == {"num_speculative_tokens": 0}
        # Slow enough for a busy machine: a page that cannot keep up never holds still for a click.
        chunks_per_pause, pause = (1, 0.01) if prompt == ENDLESS else (16, 0.002)
        stream = self._stream(self._chunks(prompt, is_plain), chunks_per_pause, pause)
        return StreamingResponse(stream, media_type="text/event-stream")

    def _chunks(self, prompt: str, is_plain: bool) -> Iterable[Chunk]:
        if prompt.startswith("long "):
            size = int(prompt.removeprefix("long "))
            return (chain_pass(" x", [f" {i}", " of"], [], " many\n" if i % 4 == 0 else " many") for i in range(size))
        if prompt == ENDLESS:
            return (plain_pass(f"{i} ") for i in count())
        chunks = SCRIPTS.get(prompt, [])
        if is_plain:
            pieces = [piece for c in chunks for piece in c["choices"][0]["foredraft_trace"]["pieces"]]
            return [plain_pass(piece) for piece in pieces]
        return chunks

    async def _stream(self, chunks: Iterable[Chunk], chunks_per_pause: int, pause: float) -> AsyncIterator[str]:
        self.running += 1
        try:
            for number, c in enumerate(chunks):
                yield f"data: {json.dumps(c)}\n\n"
                await asyncio.sleep(pause if number % chunks_per_pause == 0 else 0)
            end = {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}
            yield f"data: {json.dumps(end)}\n\ndata: [DONE]\n\n"
        finally:
            self.running -= 1
