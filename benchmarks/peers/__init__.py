"""tformer beside CTranslate2 and eager PyTorch, with the same weights and sources: `make bench-peers`."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
