"""Generation with one target and one engine: prompts in, deltas and completions out."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from foredraft.chat import Conversation, encode_chat, has_chat_template, has_images, list_conversations
from foredraft.engine.engine import Engine
from foredraft.engine.shared_engine import SharedEngine
from foredraft.engine.transcript import Transcript
from foredraft.errors import ForedraftError
from foredraft.image_chat import ImageChat
from foredraft.models.hf import HFModel
from foredraft.models.processor_template import adapt_given
from foredraft.models.prompts import Prompt, list_prompts
from foredraft.outputs import Completion, Delta
from foredraft.request_factory import RequestFactory
from foredraft.request_options import RequestOptions
from foredraft.sampling.params import Sampling

Parameters = TypeVar("Parameters", Sampling, RequestOptions)

log = logging.getLogger("foredraft.llm")  # the module of the public class: log settings of programs have this name


class CompletionGenerator(ImageChat):
    """Methods of `LLM` that take prompts. `LLM` sets the fields, and its `close` deletes them."""

    target: HFModel
    tokenizer: Any | None
    engine: Engine
    _requests: RequestFactory
    _shared: SharedEngine  # around `engine`
    _has_warned_chat_template = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[Completion]:
        """Generate completions of every prompt, `n` samples each, in order.

        Args:
            prompts: a string, a list of token ids, a `Seq2Seq` for an encoder-decoder model, an `ImagePrompt` for a
                vision-language model, or a list of these. The chat template of the model is not applied; `chat` applies
                it.
            sampling: one for all prompts, or one per prompt. Default None = `Sampling()`: temperature 1.0, at most 128
                tokens. The default temperature of the command line is 0.0.
            options: verification rule, draft length, prediction and so on: one for all prompts, or one per prompt.
                Default None = `RequestOptions()`.

        Returns:
            One completion per prompt and sample. A request that fails alone has finish_reason "error".

        Raises:
            ForedraftError: for invalid prompts or options, and for requests that do not fit into the KV memory.
        """
        done = {
            delta.index: delta.completion
            for delta in self.stream(prompts, sampling, options=options)
            if delta.completion
        }
        return [done[index] for index in sorted(done)]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer one conversation, or each of several, with the chat template of the model.

        Args:
            messages: dicts with `role` and `content`, oldest first; a list of such lists is several conversations. A
                content may be a list of parts with text and images, as of `foredraft.chat.list_images`.
            sampling: one for all conversations, or one each, as for `generate`.
            options: likewise.
            chat_template: Jinja source. Default None = the template of the model.
            template_options: further variables of the template, such as {"enable_thinking": False}. Default None.

        Raises:
            ForedraftError: for malformed messages, or without a template.
        """
        prompts: list[Prompt] = []
        for one in list_conversations(messages):
            encode = self.encode_image_chat if has_images(one) else self.encode_chat
            prompts.append(encode(one, chat_template=chat_template, template_options=template_options))
        return self.generate(prompts, sampling, options=options)

    def encode_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return one conversation as token ids for `generate` or `stream`; arguments as in `foredraft.chat`."""
        return encode_chat(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=adapt_given(self.tokenizer, chat_template),
            template_options=template_options,
            is_source=self.target.has_encoder,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template, as instruct models do."""
        return has_chat_template(self.tokenizer)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> Iterator[Delta]:
        """Yield deltas while text is generated; arguments and errors as for `generate`.

        Leaving the loop early aborts the requests that have not finished.
        """
        # Requests are added when the stream is first read, so a stream that is never read holds no pages.
        return self._shared.read(self._prepare_requests(prompts, sampling, options))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[Completion]:
        """Run `generate` without blocking the event loop. Cancelling aborts the requests."""
        async with aclosing(self.astream(prompts, sampling, options=options)) as deltas:
            done = {delta.index: delta.completion async for delta in deltas if delta.completion}
        return [done[index] for index in sorted(done)]

    async def astream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Run `stream` without blocking the event loop: steps run on a thread, errors are raised at the first delta.

        Cancelling aborts the requests. So does `aclose` after leaving the loop early: use contextlib.aclosing.
        """
        transcripts = await asyncio.to_thread(self._prepare_requests, prompts, sampling, options)
        async with aclosing(self._shared.read_async(transcripts)) as deltas:
            async for delta in deltas:
                yield delta

    def _prepare_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
    ) -> list[Transcript]:
        self._shared.check()
        several = list_prompts(prompts)
        self._warn_about_chat_template(several)
        params = _list_per_prompt(Sampling, sampling, len(several))
        each_options = _list_per_prompt(RequestOptions, options, len(several))
        transcripts: list[Transcript] = []
        for prompt, s, one in zip(several, params, each_options, strict=True):
            transcripts += self.prepare(prompt, s, one, first_index=len(transcripts))
        for transcript in transcripts:
            self.engine.check(transcript.request)
        return transcripts

    def _warn_about_chat_template(self, prompts: list[Prompt]) -> None:
        """Log once that text goes to an instruct model without its chat template."""
        if (
            not self._has_warned_chat_template
            and self.has_chat_template
            and any(isinstance(prompt, str) for prompt in prompts)
        ):
            self._has_warned_chat_template = True
            log.warning(
                "the model has a chat template, and prompts given as text do not go through it; "
                "LLM.chat puts messages into the template"
            )

    def prepare(
        self, prompt: Prompt, s: Sampling, options: RequestOptions | None = None, first_index: int = 0
    ) -> list[Transcript]:
        """Check one prompt and return its n samples, ready for an engine. Any thread may call it.

        Raises:
            ForedraftError: for a prompt or an option that this model does not support.
        """
        return self._requests.prepare(prompt, s, options or RequestOptions(), first_index)


def _list_per_prompt(
    kind: type[Parameters], value: Parameters | Sequence[Parameters] | None, num_prompts: int
) -> list[Parameters]:
    """Return one object of class `kind` per prompt, from one for all or one each; None stands for the defaults."""
    if value is None or isinstance(value, kind):
        return [kind() if value is None else value] * num_prompts
    several = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    values = [kind() if one is None else one for one in several]
    name = kind.__name__
    wrong = next((one for one in values if not isinstance(one, kind)), None)
    if wrong is not None:
        raise ForedraftError(f"{wrong!r:.80} is no {name}; give one {name} or one per prompt")
    if len(values) != num_prompts:
        plural = name.removesuffix("s") + "s"
        raise ForedraftError(f"{num_prompts} prompts and {len(values)} {plural}; give one {name} or one each")
    return values
