"""Layouts: a checkpoint as the files that another runtime reads, each proven in that runtime.

A module a layout, which follows `layout.Layout`. This list loads none of them.
"""

LAYOUTS: dict[str, str] = {
    "ctranslate2": "CTranslate2",
    "one-file": "plain ONNX Runtime in any language: one graph that generates",
    "optimum": "optimum-onnx, and plain ONNX Runtime in any language",
    "transformers-js": "transformers.js, in browsers and in Node",
    "marian": "marian-decoder",
}
"""Name of a layout → which runtime reads it. Its module here has the same name, with _ for -."""
