"""Ways to use a bundle: `Translator`, `TextEncoder`, and a corpus in shards, on this machine or on Ray.

In: lines of text and a bundle. Out: translations with scores, vectors, or files of them.
`cli`, `check` and `bench` use it; it needs no torch.
"""
