"""The method `hydra`: Medusa heads that read the draft tokens before them."""
