"""Protocols that clients speak, each a module with `routes(models)`.

One with errors in a format of its own has `PATHS`, what its paths begin with, and `failed(error)`, which answers them.
`SUBMITS` are its paths that translate, and are refused at once where the queue is full.
"""
