"""Recurrent layers of transformers models: state-space layers, linear attention, short convolutions."""
