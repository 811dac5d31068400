"""The model in PyTorch: its configuration, the network, what a module of the user's own must do, and checkpoints.

In: a `ModelConfig` or a user's module. Out: a `Seq2Seq`, to train, export, and compare engines with.
`config` does not import torch and may be used anywhere; the rest is for code that needs the model itself.
"""
