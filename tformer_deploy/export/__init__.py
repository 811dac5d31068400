"""From a checkpoint to graphs: trace, passes, quantization, ONNX files, programs, TensorRT plans.

In: a `Seq2Seq` and recipes. Out: a bundle that was checked (`checked.py`), and plans in it (`build.py`, over
`trt_builder.py`). `cli` uses these three, which use engines; the rest knows no engine. `check` reads graphs with
`save.py`.
"""
