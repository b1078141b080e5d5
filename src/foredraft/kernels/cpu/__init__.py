"""Native kernels for processors: C sources, their build and their bindings."""
