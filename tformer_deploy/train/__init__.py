"""Training: data, the loop, metrics, and runs that can be resumed.

In: two files of parallel lines. Out: a run folder with the averaged checkpoint, tokenizers and metrics.
`cli` and `importers` use it; `check` uses `metrics`.
"""
