"""ONNX Runtime: one engine for each kind of step."""
