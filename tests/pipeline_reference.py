"""What transformers 4 generates: a program for an environment of its own. In: cases as JSON; out: results as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(cases: str, out: str) -> None:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: list[Any] = []
    models: dict[str, Any] = {}
    for case in json.loads(Path(cases).read_text()):
        if case["folder"] not in models:
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(case["folder"], dtype=torch.float32).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(case["folder"])
            models[case["folder"]] = model, tokenizer
        model, tokenizer = models[case["folder"]]
        if case["task"] == "generate":
            ids = torch.tensor(case["input_ids"])
            mask = torch.tensor(case["attention_mask"])
            given = dict(case["arguments"])
            if allowed := given.pop("allowed", None):
                given["prefix_allowed_tokens_fn"] = lambda number, sent, allowed=allowed: allowed[len(sent) % 2]
            found.append(model.generate(ids, attention_mask=mask, **given).tolist())
        else:
            made = transformers.pipeline(case["task"], model=model, tokenizer=tokenizer)
            found.append(made(case["texts"], **case["arguments"]))
    Path(out).write_text(json.dumps({"version": transformers.__version__, "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
