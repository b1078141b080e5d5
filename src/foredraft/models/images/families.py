"""Families of vision-language models by how images were tried with them."""

# Greedy token ids equal those of transformers' generate: tests/models/images/test_image_families.py.
TESTED_FAMILIES = frozenset(
    "gemma3 gemma4 internvl llava llava_next mistral3 qwen2_5_vl qwen2_vl qwen3_5 qwen3_vl qwen3_vl_moe "
    "vipllava".split()
)
# Families that would be computed wrongly, and why.
REFUSED_FAMILIES = {
    "llama4": "its chunked attention is code of its own over padded sequences, which has no rows of images",
    "mllama": "layers of cross-attention read its images beside the text, not in place of tokens",
    "paligemma": "all tokens of its prompts see each other, and a prompt is computed in parts here",
}
