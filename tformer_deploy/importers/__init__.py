"""Other tools' checkpoints to ours: a file a format. Nothing else in the package knows formats.

In: a file or folder of another tool. Out: a run folder whose model was compared with the original.
`cli` uses it.
"""
