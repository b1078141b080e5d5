"""Conversations with images as prompts."""

from collections.abc import Mapping
from typing import Any

from foredraft.chat import Conversation, encode_chat, list_images
from foredraft.image_prompt import EncodedImagePrompt
from foredraft.models.hf import HFModel
from foredraft.models.processor_template import adapt_given


class ImageChat:
    """Base of `CompletionGenerator`. `LLM` sets the fields."""

    target: HFModel
    tokenizer: Any | None

    def encode_image_chat(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> EncodedImagePrompt:
        """Return one conversation with images for `generate` or `stream`; arguments as in `foredraft.chat`.

        The images are encoded here. Several requests may have the result.

        Raises:
            ForedraftError: the target has no image part, or an image or a message is refused.
        """
        encoder = self.target.require_image_encoder(self.target.name)
        images = encoder.read(list_images(messages))
        ids = encode_chat(
            self.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=adapt_given(self.tokenizer, chat_template),
            template_options=template_options,
            takes_images=True,
        )
        tokens, placed = encoder.place(ids, images)
        return EncodedImagePrompt(tuple(tokens), placed)
