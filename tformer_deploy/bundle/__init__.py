"""What is shipped: manifest, recipe, names and shapes of the graphs, tokenizers, plans, shortlists.

In: a bundle's folder. Out: objects that were checked against schemas and hashes.
All rooms above `model.config` may use it; it runs no model and needs no torch.
"""
