"""The GPU kit: all that a GPU host without a network needs, in pieces, and what comes back from it. See docs/gpu.md."""
