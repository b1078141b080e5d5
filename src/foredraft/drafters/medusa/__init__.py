"""The method `medusa`: one head per depth on the last hidden state of the target."""
