"""Parts that several methods share: token trees, access to the target, feature drafters, losses."""
