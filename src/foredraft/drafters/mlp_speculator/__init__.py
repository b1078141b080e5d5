"""The method `mlp_speculator`: a small recurrent network on the last hidden state of the target."""
