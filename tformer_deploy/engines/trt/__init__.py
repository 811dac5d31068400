"""TensorRT: plans on a GPU, by the Python packages of TensorRT and CUDA."""
