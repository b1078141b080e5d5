"""The clients people have: the openai SDK, lm-eval's local-completions protocol, a load generator like guidellm."""

import json
import operator
from collections.abc import Iterator

import httpx
import openai
import pytest

from foredraft import Sampling
from tests.support import tiny_models
from tests.support.server.live_server import NAME, RunningServer, make_small_llm


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


class TestOpenAI:
    """Answers of the server in the types of the SDK."""

    def test_models(self, client: openai.OpenAI):
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).owned_by == "foredraft"

    def test_completions(self, client: openai.OpenAI):
        plain = client.completions.create(model=NAME, prompt="the", max_tokens=12, seed=3, n=2, logprobs=2)
        assert [choice.index for choice in plain.choices] == [0, 1]
        assert len(plain.choices[0].logprobs.tokens) == plain.choices[0].logprobs.text_offset.__len__()
        assert plain.usage.completion_tokens <= 24
        stream = client.completions.create(
            model=NAME, prompt="the", max_tokens=12, seed=3, n=2, stream=True, stream_options={"include_usage": True}
        )
        texts, usage = ["", ""], None
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in plain.choices]
        assert usage.completion_tokens == plain.usage.completion_tokens

    def test_chat(self, client: openai.OpenAI):
        messages = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
        asked = {"model": NAME, "messages": messages, "max_completion_tokens": 12, "seed": 1, "temperature": 0.7}
        plain = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        content = plain.choices[0].logprobs.content
        assert content[0].bytes
        assert len(content[0].top_logprobs) == 2
        stream = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == plain.choices[0].message.content

    def test_the_streaming_helper(self, client: openai.OpenAI):
        messages = [{"role": "user", "content": "a"}]
        with client.chat.completions.stream(model=NAME, messages=messages, max_tokens=9, seed=1) as stream:
            text = "".join(event.delta for event in stream if event.type == "content.delta")
            final = stream.get_final_completion()
        assert final.choices[0].message.content == text
        assert final.choices[0].finish_reason in ("stop", "length")

    def test_fields_beyond_openais(self, client: openai.OpenAI):
        extra = {"top_k": 1, "ignore_eos": True, "speculative": {"num_speculative_tokens": 0}, "foredraft_trace": True}
        done = client.completions.create(model=NAME, prompt="the", max_tokens=9, extra_body=extra)
        assert set(done.choices[0].foredraft_trace["origins"]) == {"plain"}

    def test_response_format(self, client: openai.OpenAI):
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        asked = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
        }
        messages = [{"role": "user", "content": "a"}]
        done = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=99, seed=1, response_format=asked
        )
        assert set(json.loads(done.choices[0].message.content)) == {"a"}

    def test_errors_are_its_own(self, client: openai.OpenAI):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=NAME, prompt="a", suffix="b")
        assert refused.value.param == "suffix"
        with pytest.raises(openai.BadRequestError, match="tools"):
            client.chat.completions.create(
                model=NAME,
                messages=[{"role": "user", "content": "a"}],
                tools=[{"type": "function", "function": {"name": "not a name"}}],
            )


class TestLmEval:
    """Log-likelihoods as lm-eval's local-completions requests them: batches of token ids, echoed."""

    CASES = (("the end", " of the"), ("def naïve(", "café"), ("for word", " in"), ("größe ", "東京"))

    def test_the_remote_tokenizer(self, server: RunningServer):
        info = server.get("/tokenizer_info").json()
        assert info["eos_token"] == "<end>"
        assert isinstance(info["model_max_length"], int)
        made = server.post("/tokenize", {"prompt": "größe", "add_special_tokens": False}).json()
        assert made["tokens"] == tiny_models.tokenizer()("größe", add_special_tokens=False).input_ids

    def test_log_likelihoods(self, server: RunningServer):
        tokenizer = tiny_models.tokenizer()
        pairs = [(tokenizer(context).input_ids, tokenizer(more).input_ids) for context, more in self.CASES]
        body = {"model": NAME, "prompt": [c + m for c, m in pairs], "temperature": 0, "max_tokens": 1, "logprobs": 1}
        answer = server.post_ok("/v1/completions", **body, seed=1234, echo=True)
        choices = sorted(answer["choices"], key=operator.itemgetter("index"))
        for (context, more), choice in zip(pairs, choices, strict=True):
            values, is_greedy = self.parse_choice(choice, len(context))
            (expected,) = (
                make_small_llm().with_drafter(None).generate(context + more, Sampling(max_tokens=1, prompt_logprobs=1))
            )
            entries = expected.prompt_logprobs[len(context) :]
            assert values == pytest.approx([entry.raw_logprob for entry in entries], abs=1e-9)
            assert is_greedy == all(entry.raw_top[0][0] == entry.token_id for entry in entries)

    def test_a_greedy_continuation_is_seen_as_such(self, server: RunningServer):
        prompt = tiny_models.tokenizer()("the end").input_ids
        (own,) = (
            make_small_llm().with_drafter(None).generate(prompt, Sampling(max_tokens=9, temperature=0, ignore_eos=True))
        )
        body = {"prompt": [prompt + own.token_ids], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
        (choice,) = server.post_ok("/v1/completions", **body)["choices"]
        assert self.parse_choice(choice, len(prompt))[1]

    @staticmethod
    def parse_choice(choice: dict, context: int) -> tuple[list[float], bool]:
        """Parse a choice as lm-eval does: the last token is the generated one."""
        logprobs = choice["logprobs"]
        values, tops = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
        return values, all(value == max(top.values()) for value, top in zip(values, tops, strict=True))

    def test_generation_until(self, server: RunningServer):
        prompt = tiny_models.tokenizer()("the").input_ids
        body = {"prompt": [prompt], "max_tokens": 20, "temperature": 0, "stop": ["zz", "<end>"], "seed": 1234}
        assert isinstance(server.post_ok("/v1/completions", model=NAME, **body)["choices"][0]["text"], str)


class TestLoadGenerator:
    """guidellm's sequence: health, models, then chat streams of exactly the requested length, counted by usage."""

    def test_a_run(self, server: RunningServer):
        with httpx.Client(base_url=server.url, timeout=60) as client:
            assert client.get("/health").status_code == 200
            model = client.get("/v1/models").json()["data"][0]["id"]
            for size in (1, 7, 33):
                body = {
                    "model": model, "messages": [{"role": "user", "content": [{"type": "text", "text": "the"}]}],
                    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                    "max_completion_tokens": size, "max_tokens": size, "ignore_eos": True, "stop": None,
                }  # fmt: skip
                with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    lines = [line for line in answer.iter_lines() if line]
                assert lines[-1] == "data: [DONE]"
                chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
                assert chunks[-1]["usage"]["completion_tokens"] == size
                assert all("usage" in chunk for chunk in chunks)
                # one token may be no more than the beginning of a character
                assert size < 33 or any(
                    chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1] if chunk["choices"]
                )
