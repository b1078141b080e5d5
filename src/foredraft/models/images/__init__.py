"""Image input of vision-language targets."""
