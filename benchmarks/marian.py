"""Train a small Marian model with transformers on Multi30K, import it, and compare its translations with the bundle's.

`--run FOLDER` keeps everything: what is in it is not made again, so the comparison can be repeated without training.
The exit code is 3 where fp32 differs from transformers in a sentence that is no tie.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers loads: nothing is fetched

import sacrebleu
import sentencepiece
import torch
import transformers

from tformer_deploy.check.gate import machine

SIZES: dict[str, Any] = {
    "d_model": 128,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_position_embeddings": 256,
    "dropout": 0.15,
}
PIECES, BATCH_TOKENS, PEAK_LR, WARMUP = 5000, 2560, 3e-3, 600
RECIPES = ("fp32", "fp32-cpu", "int8")
EXACT = ("fp32", "fp32-cpu")
"""Recipes whose tokens must be those of transformers."""
CHECKED = 200
"""Sentences of the check at export."""
TIE = 1e-4
"""Two candidates of a search whose values are this close may change places."""
Pair = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Output:
    """What a sentence became: tokens without start and end, and their text."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class Options:
    """The command line."""

    data: Path
    run: Path
    machine: str
    updates: int
    seed: int
    batch: int


def main() -> None:
    """Make what is not there, compare, print, and write the result."""
    options = parse()
    folder, bundle = options.run / "hf", options.run / "bundle"
    if not folder.is_dir():
        train(options, folder)
    sources, targets = read(options, "test_2016_flickr.en"), read(options, "test_2016_flickr.de")
    made = make_bundle(options, folder, bundle, sources)
    theirs, seconds = generate(folder, sources, options.batch)
    results: dict[str, Any] = {
        "machine": {**machine(), "transformers": transformers.__version__, "sacrebleu": sacrebleu.__version__},
        "sentences": len(sources),
        "model": {**SIZES, "updates": options.updates, "pieces": PIECES},
        "generation": json.loads((folder / "generation_config.json").read_text()),
        "import": made,
        "transformers": {**bleu(theirs, targets), "seconds": seconds},
    }
    wrong = 0
    for variant in RECIPES:
        ours = translate(bundle, variant, sources)
        apart = [i for i, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0].ids != pair[1].ids]
        listed = differences(folder, sources, theirs, ours, apart) if variant in EXACT else []
        wrong += sum(not each["tie"] for each in listed)
        wrong += sum(a.ids == b.ids and a.text != b.text for a, b in zip(theirs, ours, strict=True))
        results[variant] = {
            **bleu(ours, targets),
            "equal_ids": len(sources) - len(apart),
            "equal_text": sum(a.text == b.text for a, b in zip(theirs, ours, strict=True)),
            "apart": listed,
        }
    if options.machine:
        name = f"{datetime.date.today()}-{options.machine}-marian.json"
        (Path(__file__).parent / "results" / name).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    sys.exit(3 if wrong else 0)


def parse() -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.marian", description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train, val, test_2016_flickr .en.gz, .de.gz"
    )
    parser.add_argument("--run", type=Path, required=True, help="folder that keeps the model, its run and its bundle")
    parser.add_argument("--machine", default="", help="short name for the file of results; without it none is written")
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, help="sentences of a batch of transformers")
    return Options(**vars(parser.parse_args()))


def read(options: Options, name: str) -> list[str]:
    """Lines of a file of Multi30K."""
    return gzip.decompress((options.data / f"{name}.gz").read_bytes()).decode().splitlines()


def make_bundle(options: Options, folder: Path, bundle: Path, sources: list[str]) -> dict[str, Any]:
    """Import and export with the real commands; what `tformer import` says of the comparison."""
    run, said = options.run / "run", options.run / "import.json"
    for name, lines in (("test.en", sources), ("checked.en", sources[:CHECKED]), ("val.en", read(options, "val.en"))):
        (options.run / name).write_text("".join(f"{line}\n" for line in lines))
    if not bundle.is_dir():
        text = tformer("import", "hf", folder, "--out", run, "--src", options.run / "test.en", "--json", "--force")
        said.write_text(text)
        recipes = [word for recipe in RECIPES for word in ("--recipe", recipe)]
        corpus = ("--src", options.run / "checked.en", "--calibrate", options.run / "val.en")
        tformer("export", run, "--out", bundle, *recipes, *corpus)
    return dict(json.loads(said.read_text())["compared"])


def generate(folder: Path, sources: list[str], batch: int) -> tuple[list[Output], float]:
    """`generate` of transformers with the folder's own generation config, and its seconds."""
    model: Any = transformers.MarianMTModel.from_pretrained(folder).eval()  # type: ignore[no-untyped-call]
    tokenizer: Any = transformers.MarianTokenizer.from_pretrained(folder)
    found, begin = [], time.perf_counter()
    for start in range(0, len(sources), batch):
        inputs = tokenizer(sources[start : start + batch], return_tensors="pt", padding=True)
        with torch.inference_mode():
            rows = model.generate(**inputs)
        found += [output(row, tokenizer) for row in rows.tolist()]
    return found, time.perf_counter() - begin


def output(row: list[int], tokenizer: Any) -> Output:
    """A row of `generate`: the start token, those of the output, the end, padding."""
    ids = row[1:]
    ids = ids[: ids.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in ids else ids
    return Output(ids, tokenizer.decode(row, skip_special_tokens=True))


def translate(bundle: Path, variant: str, sources: list[str]) -> list[Output]:
    """`tformer translate` with the bundle's own decoding options."""
    lines = tformer("translate", bundle, "--variant", variant, "--json", stdin="".join(f"{s}\n" for s in sources))
    return [Output(row["ids"], row["text"]) for row in map(json.loads, lines.splitlines())]


def differences(
    folder: Path, sources: list[str], theirs: list[Output], ours: list[Output], apart: list[int]
) -> list[dict[str, Any]]:
    """Whether outputs differ by rounding: what float64 has for both, and which one it finds itself.

    A tie: their values are within TIE, or the search of transformers in float64 gives ours.
    """
    model: Any = transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float64).eval()  # type: ignore[no-untyped-call]
    tokenizer: Any = transformers.MarianTokenizer.from_pretrained(folder)
    found = []
    for i in apart:
        inputs, values = tokenizer(sources[i], return_tensors="pt"), []
        with torch.inference_mode():
            for each in (theirs[i], ours[i]):
                target = torch.tensor([[model.config.decoder_start_token_id, *each.ids, tokenizer.eos_token_id]])
                scores = model(**inputs, decoder_input_ids=target[:, :-1]).logits.log_softmax(-1)
                values.append(float(scores.gather(-1, target[:, 1:, None]).mean()))
            exact = output(model.generate(**inputs)[0].tolist(), tokenizer)
        margin = abs(values[0] - values[1])
        names = {"transformers": theirs[i], "ours": ours[i]}
        found.append(
            {
                "sentence": i + 1,
                **{name: each.text for name, each in names.items()},
                "margin": margin,
                "float64_gives": next((name for name, each in names.items() if each.ids == exact.ids), "another"),
                "tie": margin <= TIE or exact.ids == ours[i].ids,
            }
        )
    return found


def bleu(made: list[Output], targets: list[str]) -> dict[str, float]:
    """BLEU of sacrebleu, 13a."""
    lines = [each.text for each in made]
    return {
        "bleu": sacrebleu.corpus_bleu(lines, [targets]).score,
        "bleu_lowercased": sacrebleu.corpus_bleu(lines, [targets], lowercase=True).score,
    }


def tformer(*arguments: object, stdin: str = "") -> str:
    """Run the command; what it prints."""
    command = [sys.executable, "-m", "tformer_deploy", *map(str, arguments)]
    done = subprocess.run(command, input=stdin, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return done.stdout


def train(options: Options, out: Path) -> None:
    """Learn pieces and weights; the folder appears when it is complete."""
    torch.manual_seed(options.seed)
    making = out.with_name("hf-unfinished")
    making.mkdir(parents=True, exist_ok=True)
    vocab = write_text(making, [*read(options, "train.en"), *read(options, "train.de")])
    ids: dict[str, Any] = {name: vocab["<pad>"] for name in ("pad_token_id", "decoder_start_token_id")} | {
        "eos_token_id": 0
    }
    config = transformers.MarianConfig(
        **SIZES,
        **ids,
        vocab_size=len(vocab),
        activation_function="swish",
        scale_embedding=True,
        forced_eos_token_id=None,
    )
    model: Any = transformers.MarianMTModel(config)
    # What published folders of Marian models have.
    model.generation_config = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        **ids, num_beams=4, max_length=128, bad_words_ids=[[vocab["<pad>"]]], forced_eos_token_id=0
    )
    tokenizer = transformers.MarianTokenizer.from_pretrained(making)
    pairs = encode(tokenizer, read(options, "train.en"), read(options, "train.de"))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(pairs):,} pairs", flush=True)
    fit(model, pairs, options)
    model.eval().save_pretrained(making)
    making.rename(out)


def write_text(folder: Path, lines: list[str]) -> dict[str, int]:
    """The tokenizer's files: one sentencepiece model for both sides, and the ids of its pieces."""
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "source"),
        vocab_size=PIECES,
        character_coverage=1.0,
        unk_id=1,
        eos_id=0,
        bos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "source.vocab").unlink()
    (folder / "source.model").rename(folder / "source.spm")
    shutil.copy(folder / "source.spm", folder / "target.spm")
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    vocab["<pad>"] = len(vocab)
    described = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return vocab


def encode(tokenizer: Any, sources: list[str], targets: list[str]) -> list[Pair]:
    """Ids of both sides, each with its end."""
    return list(zip(tokenizer(sources).input_ids, tokenizer(text_target=targets).input_ids, strict=True))


def fit(model: Any, pairs: list[Pair], options: Options) -> None:
    """Adam, a warm-up, then a cosine to 0; label smoothing."""
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), eps=1e-9)
    begin, step, losses = time.perf_counter(), 0, 0.0
    pad = model.config.pad_token_id
    model.train()
    for epoch in range(options.updates):
        for rows in batches(pairs, options.seed + epoch):
            step += 1
            left = math.cos(math.pi / 2 * max(0, step - WARMUP) / max(1, options.updates - WARMUP)) ** 2
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * min(step / WARMUP, left)
            source, target = (padded([pair[side] for pair in rows], pad) for side in (0, 1))
            start = torch.full((len(rows), 1), model.config.decoder_start_token_id)
            logits = model(
                input_ids=source,
                attention_mask=(source != pad).long(),
                decoder_input_ids=torch.cat((start, target[:, :-1]), 1),
                use_cache=False,
            ).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), target.flatten(), ignore_index=pad, label_smoothing=0.1
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses += float(loss.detach())
            if step % 100 == 0:
                print(
                    f"{step}/{options.updates} loss {losses / 100:.3f} {time.perf_counter() - begin:.0f} s", flush=True
                )
                losses = 0.0
            if step == options.updates:
                return


def batches(pairs: list[Pair], seed: int) -> list[list[Pair]]:
    """Pairs of similar length, about BATCH_TOKENS padded target tokens each, in random order."""
    rng = random.Random(seed)
    order = sorted(pairs, key=lambda pair: (len(pair[1]) + rng.random(), len(pair[0])))
    found: list[list[Pair]] = [[]]
    for pair in order:
        if (len(found[-1]) + 1) * max(map(len, pair)) > BATCH_TOKENS:
            found.append([])
        found[-1].append(pair)
    rng.shuffle(found)
    return found


def padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    """Rows of ids side by side, filled up at the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows])


if __name__ == "__main__":
    main()
