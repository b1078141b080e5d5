"""The method `eagle3`: a decoder layer over hidden states of several depths of the target."""
