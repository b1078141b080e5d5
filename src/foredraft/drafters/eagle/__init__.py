"""The method `eagle`: a decoder layer over the last hidden states of the target."""
