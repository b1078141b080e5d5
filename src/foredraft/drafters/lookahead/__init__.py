"""The method `lookahead`: n-grams that the target itself computes in spare rows."""
