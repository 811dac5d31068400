"""Time `pipeline` beside `generate` of transformers 4, of one Marian model of `base` size, and compare their tokens.

The model has random weights, and its outputs never end. Sides take turns, each in a process of its own. The exit code
is 3 where an fp32 side has other tokens than transformers.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import shutil
import statistics
import string
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from tformer_deploy.base.processes import Process, in_turn, serve

ROOT = Path(__file__).parents[1]
THEIRS = "transformers"
SIDES = ("ort:fp32", "native:native-fp32", "native:native-int8")
POINTS = [(beams, batch) for beams in (1, 4) for batch in (1, 8)]
PIECES, WORDS, TEXT, WORDS_A_LINE, LINES, NEW_TOKENS = 31_990, 40_000, 40_000, 11, 8, 32
SIZES: dict[str, Any] = {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "max_position_embeddings": 128,
}
TABLES, LAYERS, NEVER = 0.03, 0.4, -1e4
"""Standard deviations of embeddings, and of other weights times the root of their inputs; the bias of the end token."""


def main() -> None:
    """Make what is not there, take turns, print a line for each point, and write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.pipelines", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder that keeps the model and its exports")
    parser.add_argument("--python", default=sys.executable, help="of an environment that has transformers 4")
    parser.add_argument("--sides", nargs="+", default=SIDES, help="BACKEND:VARIANT of pipeline")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default="", help="short name for the file of results; without it none is written")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.work.resolve() / "marian"
    if options.only:
        serve(Theirs(folder, options.threads) if options.only == THEIRS else Ours(folder, options))
        return
    if not folder.is_dir():
        make_model(folder)
    arguments = ["-m", "benchmarks.pipelines", "--work", str(folder.parent), "--threads", str(options.threads)]
    other = str(Path(shutil.which(options.python) or options.python).absolute())  # not resolved: venvs are links
    workers: dict[str, Process] = {}
    for side in (THEIRS, *options.sides):
        python = other if side == THEIRS else sys.executable
        variables = {"XDG_CACHE_HOME": str(folder.parent / "cache"), "HF_HUB_OFFLINE": "1"}
        workers[side] = Process(side, [python, *arguments, "--only", side], cwd=ROOT, env=variables)
    try:
        result: dict[str, Any] = {"versions": {side: worker.ask("versions") for side, worker in workers.items()}}
        result |= {"threads": options.threads, "rounds": options.rounds, "new_tokens": NEW_TOKENS, "model": SIZES}
        result["points"] = [measure(workers, *point, options.rounds) for point in POINTS]
    finally:
        for worker in workers.values():
            worker.end(kill=True)
    if options.machine:
        path = Path(__file__).parent / f"results/{date.today()}-{options.machine}-pipelines.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
    exact = [point[side] for point in result["points"] for side in options.sides if "fp32" in side]
    sys.exit(3 if any(min(each["equal"], each["equal_text"]) < LINES for each in exact) else 0)


class Theirs:
    """`generate` of transformers, with its tokenizer."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

        torch.set_num_threads(threads)
        self.model: Any = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def versions(self) -> dict[str, str]:
        """Of what runs."""
        import torch
        import transformers

        return {"transformers": transformers.__version__, "torch": torch.__version__}

    def run(self, beams: int, batch: int, tokens: bool) -> dict[str, Any]:
        """Wall-clock and processor's seconds, and the outputs of all lines, as tokens or as text."""

        def generate(lines: list[str]) -> list[Any]:
            given = self.tokenizer(lines, return_tensors="pt", padding=True)
            rows = self.model.generate(**given, num_beams=beams, max_new_tokens=NEW_TOKENS)
            return rows.tolist() if tokens else self.tokenizer.batch_decode(rows, skip_special_tokens=True)  # type: ignore[no-any-return]

        return timed(generate, batch)


class Ours:
    """`pipeline`, with a backend and a variant."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        from tformer_deploy import pipeline

        backend, _, variant = options.only.partition(":")
        how = {"backend": backend, "variant": variant, "threads": options.threads, "compare": False}
        self.pipeline = pipeline("translation", model=folder, **how)

    def versions(self) -> dict[str, str]:
        """See `Theirs.versions`."""
        from tformer_deploy.check.gate import machine

        return machine()

    def run(self, beams: int, batch: int, tokens: bool) -> dict[str, Any]:
        """See `Theirs.run`."""

        def generate(lines: list[str]) -> list[Any]:
            asked = {"num_beams": beams, "max_new_tokens": NEW_TOKENS, "return_tensors": tokens, "batch_size": batch}
            found = [next(iter(record.values())) for record in self.pipeline(lines, **asked)]
            return [each.tolist() for each in found] if tokens else found

        return timed(generate, batch)


def timed(generate: Any, batch: int) -> dict[str, Any]:
    """All lines, in batches."""
    lines, start = make_lines(), (time.perf_counter(), time.process_time())
    outputs = [each for i in range(0, len(lines), batch) for each in generate(lines[i : i + batch])]
    return {"wall": time.perf_counter() - start[0], "cpu": time.process_time() - start[1], "outputs": outputs}


def measure(workers: dict[str, Process], beams: int, batch: int, rounds: int) -> dict[str, Any]:
    """One point: tokens, which warm up, then rounds of text. Ratios are medians of those within a round."""
    tokens = {side: each.ask("run", beams=beams, batch=batch, tokens=True)["outputs"] for side, each in workers.items()}
    assert all(len(row) == NEW_TOKENS + 1 for row in tokens[THEIRS]), "an output has ended"
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in workers}
    for number in range(rounds):
        for side in in_turn(list(workers), number):
            turns[side].append(workers[side].ask("run", beams=beams, batch=batch, tokens=False))
    point: dict[str, Any] = {"beams": beams, "batch": batch}
    for side, found in turns.items():
        wall, cpu = ([turn[clock] for turn in found] for clock in ("wall", "cpu"))
        point[side] = {
            "wall_seconds": wall,
            "cpu_seconds": cpu,
            "tokens_per_second": LINES * NEW_TOKENS / statistics.median(wall),
            "times_as_fast": {clock: ratio(turns[THEIRS], found, clock) for clock in ("wall", "cpu")},
            "equal": sum(a == b for a, b in zip(tokens[THEIRS], tokens[side], strict=True)),
            "equal_text": sum(a == b for a, b in zip(turns[THEIRS][0]["outputs"], found[0]["outputs"], strict=True)),
        }
        speed, times = point[side]["tokens_per_second"], point[side]["times_as_fast"]
        said = f"{speed:.0f} tokens/s, x{times['wall']:.2f} by wall time, x{times['cpu']:.2f} by CPU time"
        print(f"beams {beams}, batch {batch}, {side}: {said}, {point[side]['equal']} of {LINES} equal", flush=True)
    return point


def ratio(theirs: list[dict[str, Any]], ours: list[dict[str, Any]], clock: str) -> float:
    """Median of the ratios of a clock's seconds."""
    return float(statistics.median(a[clock] / b[clock] for a, b in zip(theirs, ours, strict=True)))


def words() -> list[str]:
    """Words of random letters."""
    draw = random.Random(1)
    return ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 8))) for _ in range(WORDS)]


def make_lines() -> list[str]:
    """The text to translate."""
    draw, known = random.Random(2), words()
    return [" ".join(draw.choices(known, k=WORDS_A_LINE)) for _ in range(LINES)]


def make_model(folder: Path) -> None:
    """A folder of MarianMTModel with a vocabulary of random words."""
    import sentencepiece
    import torch
    import transformers

    model, draw, known = io.BytesIO(), random.Random(3), words()
    text = (" ".join(draw.choices(known, k=10)) for _ in range(TEXT))
    ids = {"unk_id": 0, "eos_id": 1, "bos_id": -1, "pad_id": -1}
    how: dict[str, Any] = {"vocab_size": PIECES, "hard_vocab_limit": False, "minloglevel": 2, **ids}
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=text, model_writer=model, **how)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    entries = dict.fromkeys(["</s>", "<unk>", *map(pieces.id_to_piece, range(pieces.get_piece_size()))])
    vocab = {entry: i for i, entry in enumerate([*entries, "<pad>"])}
    pad = vocab["<pad>"]
    special: dict[str, Any] = {"pad_token_id": pad, "eos_token_id": 0, "bos_token_id": 0, "decoder_start_token_id": pad}
    how = {"vocab_size": len(vocab), "activation_function": "swish", "scale_embedding": True}
    made: Any = transformers.MarianMTModel(transformers.MarianConfig(**SIZES, **special, **how))
    of_generation: Any = transformers.GenerationConfig
    made.generation_config = of_generation(**special, bad_words_ids=[[pad]], max_length=128)
    generator = torch.Generator().manual_seed(4)
    for name, weight in made.named_parameters():
        if weight.requires_grad and weight.ndim > 1:
            scale = TABLES if "shared" in name or "embed_" in name else LAYERS * weight.shape[1] ** -0.5
            weight.data = scale * torch.randn(weight.shape, generator=generator)
    # The output matrix is the table of embeddings: without this, every token would be followed by itself.
    made.model.decoder.layers[-1].final_layer_norm.weight.data = torch.randn(512, generator=generator).sign()
    made.final_logits_bias[0, 0] = NEVER
    made.save_pretrained(folder)
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(model.getvalue())
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))


if __name__ == "__main__":
    main()
