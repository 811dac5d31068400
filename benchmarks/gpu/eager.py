"""Eager PyTorch with cached steps on the host's GPU: the same sizes, random weights, nothing but the device's work.

Needs torch and the `tformer_deploy` package; runs with the host's own Python.
"""

from __future__ import annotations

import json
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

DEAD = -1e9
ROUNDS, WARM_UP = 7, 3


def why_not() -> str:
    """Why it cannot run here; empty: it can."""
    try:
        import torch
    except ImportError as error:
        return f"the host's Python has no torch ({error})"
    return "" if torch.cuda.is_available() else "the host's torch sees no GPU"


class Decoder:
    """Greedy decoding, or the device's part of a beam search, without waiting for the host between steps."""

    def __init__(self, model: Any, batch: int, beams: int, sizes: tuple[int, int]) -> None:
        import torch

        self.model, self.beams, self.new_tokens = model, beams, sizes[1]
        device = model.output.weight.device
        self.ids = torch.randint(4, model.config.src_vocab, (batch, sizes[0]), device=device, dtype=torch.int32)
        self.lengths = torch.full((batch,), sizes[0], device=device, dtype=torch.int32)
        self.positions = torch.arange(self.new_tokens, device=device)[:, None]
        self.first = torch.full((batch, beams), model.config.start_id, device=device, dtype=torch.int32)
        self.sums = torch.full((batch, beams), DEAD, device=device)
        self.sums[:, 0] = 0
        self.offsets = torch.arange(batch, device=device)[:, None] * beams

    def __call__(self) -> Any:
        """Tokens of the last step (B, K)."""
        from tformer_deploy.model.seq2seq import GrowingCache, first_past, log_probs

        model, rows = self.model, self.first.numel()
        cross = model.cross_keys_values(model.encode(self.ids, self.lengths))
        past, tokens, sums = first_past(model.config, cross[0][0], rows), self.first, self.sums
        for position in self.positions:
            cache = GrowingCache(past)
            scores = log_probs(model, model.step(tokens, position, self.lengths, cross, cache))
            past = cache.present
            if self.beams == 1:
                tokens = scores.argmax(-1).int()
                continue
            vocab = scores.shape[-1]
            sums, best = (sums[..., None] + scores).flatten(1).topk(self.beams)
            tokens = (best % vocab).int()
            parents = (best // vocab + self.offsets).flatten()
            past = [(k[parents], v[parents]) for k, v in past]
        return tokens


def measure(decoder: Decoder) -> list[float]:
    """Milliseconds of a batch, by CUDA events, one for each round."""
    import torch

    found = []
    for number in range(WARM_UP + ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        decoder()
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            found.append(start.elapsed_time(end))
    return found


def run(points: dict[str, Any]) -> dict[str, Any]:
    """Every point in fp32 and fp16."""
    import torch

    from tformer_deploy.model.config import preset
    from tformer_deploy.model.network import Transformer

    sizes = points["src_len"], points["new_tokens"]
    vocabulary = points["model"]["vocabulary"]
    found = []
    with torch.inference_mode():
        for dtype in ("float16", "float32"):
            model = Transformer(preset(points["model"]["preset"], vocabulary, vocabulary)).init_weights(1).eval()
            model = model.to("cuda", getattr(torch, dtype))
            model.output.register_forward_hook(lambda module, arguments, logits: logits.float())
            for beams, batch in product(points["beams"], points["batch"]):
                times = measure(Decoder(model, batch, beams, sizes))
                median = statistics.median(times)
                point = {"batch": batch, "beams": beams, "src_len": sizes[0], "new_tokens": sizes[1]}
                rate = 1e3 * batch * sizes[1] / median
                found.append({"dtype": dtype, "point": point, "ms": times, "median_ms": median, "tokens_per_s": rate})
    torch_about = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": torch.cuda.get_device_name()}
    return {**torch_about, "tf32": torch.backends.cuda.matmul.allow_tf32, "points": found}


def main() -> None:
    """`eager.py POINTS` or `eager.py --why-not`."""
    if sys.argv[1] == "--why-not":
        sys.exit(why_not() or None)
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
