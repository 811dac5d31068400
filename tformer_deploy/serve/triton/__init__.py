"""A bundle as a model of Triton Inference Server: `repository` writes it, `model` runs in Triton's Python backend."""
