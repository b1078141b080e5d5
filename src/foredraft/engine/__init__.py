"""Engine of continuous batching: scheduling, steps, transcripts, and workers on threads."""
