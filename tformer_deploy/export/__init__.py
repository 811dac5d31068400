"""Checkpoint to ONNX graphs."""
