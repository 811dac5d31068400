"""From parallel text to a run folder: data, training loop, metrics, and runs that can be resumed.

In: two files of lines. Out: a folder with the averaged checkpoint, tokenizers and metrics.
`cli` and `importers` use it; `metrics` serves `check` too.
"""
