"""`pipeline` and `generate` with the arguments and results of transformers 4.57, over our engines.

In: a Hugging Face folder, which is exported on first use, or a bundle. A machine that opens what has been exported
before needs no torch.
"""
