"""The method `chimera`: a trigram encoder, a context encoder and residual heads."""
