"""Other tools' checkpoints to ours: a file a format. Nothing else in the package knows formats."""
