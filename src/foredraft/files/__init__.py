"""Files of models: download from the hub, checks before reading, safetensors headers, complete writes."""
