"""The model in PyTorch: its configuration, the network, what a module of the user's own must do, and checkpoints.

In: a `ModelConfig` or a user's module. Out: a `Seq2Seq` that can be trained, exported and compared with.
`config` needs no torch, and all rooms may use it; the rest serves those that need the model itself.
"""
