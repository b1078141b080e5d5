"""Families of vision-language models by how images were tried with them."""

# Greedy token ids equal those of transformers' generate: tests/models/images/test_image_families.py.
TESTED_FAMILIES = frozenset({"llava", "gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl"})
# Families that would be computed wrongly, and why.
REFUSED_FAMILIES = {
    "paligemma": "all tokens of its prompts see each other, and a prompt is computed in parts here",
}
