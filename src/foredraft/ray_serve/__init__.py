"""Replicas that Ray Serve places, restarts and counts. Needs the extra [ray]; the only package that imports Ray."""
