"""Several replicas of one server behind a front that chooses a replica for each request. Knows nothing of Ray."""
