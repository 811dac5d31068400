"""Special ids are the tokenizers', the first input of the decoder is the model's: others than ours, that differ."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tformer_deploy import load
from tformer_deploy.base.errors import ArtifactError, ConfigError, DataError
from tformer_deploy.base.files import write_json
from tformer_deploy.base.headers import digest
from tformer_deploy.base.settings import from_dict
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.text import (
    OUR_SPECIALS,
    SentencePiece,
    Specials,
    Tokenizers,
    Words,
    load_tokenizers,
    require_fit,
)
from tformer_deploy.decoding import Batch, DecodeOptions, decode, forced_steps
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.calibrate import input_ranges
from tformer_deploy.export.checked import export_checked
from tformer_deploy.model.checkpoint import model_tensors, open_checkpoint, save_checkpoint, save_tensors
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import Transformer
from tformer_deploy.train.data import DataConfig
from tformer_deploy.train.runs import RunSettings, start_run

from .command import failed_line, run_here
from .conftest import VOCAB, random_model, small_config, write_checkpoint

OTHERS = Specials(pad=VOCAB - 1, bos=VOCAB - 1, eos=0, unk=1)
"""As in models of the Marian family: an output begins with padding."""
CONFIG = small_config(
    pad_id=OTHERS.pad, bos_id=OTHERS.bos, eos_id=OTHERS.eos, share_embeddings="none", decoder_layers=1
)


def words(specials: Specials = OTHERS) -> Words:
    """Entries w0, w1 and so on, those of special tokens too."""
    return Words([f"w{i}" for i in range(VOCAB)], None, specials)


def checkpoint(folder: Path, config: ModelConfig, tokenizers: Tokenizers, seed: int = 3) -> Path:
    model = random_model(config, seed)
    model.output.weight.data[config.eos_id] *= 2  # likelier to stop than most
    weights = folder / "weights/random.safetensors"
    save_tensors(weights, model_tensors(model))
    save_checkpoint(folder, config, tokenizers, weights, {})
    return folder


# Tokenizers


def test_words_have_special_tokens_where_they_are_said_to_be(tmp_path: Path) -> None:
    both = Tokenizers(words(), words(Specials(pad=-1, bos=-1, eos=7, unk=2)))
    assert both.source_ids("w5 zebra w0 w59 w3") == [5, 1, 1, 1, 3, 0]
    assert both.target_ids("w5 w7 w1 w0") == [5, 2, 1, 0, 7]
    assert both.source.decode([59, 5, 1, 0, 2, 59]) == "w5 w1 w2" and both.target_text([59, 5, 7, 2]) == "w59 w5 w2"
    assert [both.target.id_of(piece) for piece in ("w7", "w2", "w59", "zebra")] == [7, 2, 59, None]
    description = both.save(tmp_path)
    assert description["source"]["specials"] == {"pad": 59, "bos": 59, "eos": 0, "unk": 1}
    loaded = load_tokenizers(tmp_path, description)
    assert (loaded.source.specials, loaded.target.specials) == (both.source.specials, both.target.specials)
    assert loaded.source_ids("w5 zebra") == [5, 1, 0] and loaded.target_ids("w5") == [5, 7]


def test_sentencepiece_models_may_have_other_special_ids(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceTrainer

    file = io.BytesIO()
    ids: dict[str, Any] = {"unk_id": 2, "pad_id": 0, "bos_id": -1, "eos_id": 1, "minloglevel": 2}
    text = iter(["a man in a blue shirt", "ein Mann in einem Hemd"])
    SentencePieceTrainer.Train(sentence_iterator=text, model_writer=file, model_type="bpe", vocab_size=40, **ids)
    pieces = SentencePiece(file.getvalue(), Specials(pad=0, bos=-1, eos=1, unk=2))
    both = Tokenizers(pieces, pieces)
    source = both.source_ids("a man")
    assert source[-1] == 1 and min(source[:-1]) > 2
    assert both.target_text([0, *source, 0]) == "a man" and pieces.id_of("</s>") == 1
    assert pieces.id_of("<unk>") == 2 and pieces.id_of("zebra") is None and 2 in pieces.encode("漢")
    loaded = load_tokenizers(tmp_path, both.save(tmp_path))
    assert loaded.source_ids("a man") == source and loaded.source is loaded.target
    with pytest.raises(ArtifactError, match="the sentencepiece model has its unknown token at 2, not at 0"):
        SentencePiece(file.getvalue())


def test_a_description_without_special_ids_has_ours(tmp_path: Path) -> None:
    """As in checkpoints and bundles of earlier versions."""
    plain = Words(["<unk>", "<pad>", "<bos>", "<eos>", "a"], None)
    description = Tokenizers(plain, plain).save(tmp_path)
    for side in description.values():
        side.pop("specials", None)
    loaded = load_tokenizers(tmp_path, description)
    assert loaded.source.specials == OUR_SPECIALS and loaded.source_ids("a b") == [4, 0, 3]
    (tmp_path / "tokenizer.words").write_text("a\nb\nc\nd\n")
    with pytest.raises(ArtifactError, match="a word list must begin with <unk> <pad> <bos> <eos>"):
        load_tokenizers(tmp_path, description)


def test_a_word_list_has_its_special_tokens() -> None:
    with pytest.raises(ArtifactError, match="a vocabulary of 3 entries has no special token 7"):
        Words(["a", "b", "c"], None, Specials(eos=7))


# The model's start token


def test_the_start_token_is_bos_unless_it_is_said() -> None:
    values = dataclasses.asdict(CONFIG)
    del values["start_id"]
    assert small_config(bos_id=5).start_id == 5 and from_dict(ModelConfig, values, "model") == CONFIG
    assert small_config(start_id=1).start_id == 1 and small_config(start_id=1).bos_id == 2
    for start_id in (-2, VOCAB):
        with pytest.raises(ConfigError, match=f"start_id={start_id} is outside the vocabulary of {VOCAB}"):
            small_config(start_id=start_id)


def fed(model: Transformer) -> list[int]:
    """What the decoder is fed, in order, of the first row."""
    seen: list[int] = []
    model.tgt_embedding.register_forward_pre_hook(lambda _, inputs: seen.append(int(inputs[0].flatten()[0])))
    return seen


def test_every_way_to_decode_begins_with_it() -> None:
    model = random_model(small_config(start_id=9, share_embeddings="none")).eval()
    batch = Batch(np.array([[5, 6, 3]], np.int32), np.array([3], np.int32))
    ways: list[Any] = [
        lambda engine: decode(engine, batch, DecodeOptions(4)),
        lambda engine: decode(engine, batch, DecodeOptions(4, beams=2)),
        lambda engine: decode(engine, batch, DecodeOptions(4, sampling=True)),
        lambda engine: list(forced_steps(engine, batch, [[7, 3]])),
        lambda engine: input_ranges(model, [[5, 6, 3]]),
    ]
    for way in ways:
        seen = fed(model)
        with EagerEngine(model) as engine:
            way(engine)
        assert seen[0] == 9 and 2 not in seen


def test_training_feeds_it(tmp_path: Path) -> None:
    values = {"start_id": 1, "d_model": 16, "d_ff": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    trainer = start_run(tmp_path, DataConfig(task="copy"), RunSettings("tiny", "", 20, values, {"updates": 1}))
    batch = trainer.batch(trainer.train_set, np.arange(3))
    assert (batch.tgt_in[:, 0] == 1).all() and (batch.tgt_in[:, 1:] == batch.tgt_out[:, :-1]).all()


# Export, and what comes of it


def test_export_refuses_a_model_with_other_special_ids(tmp_path: Path) -> None:
    """Once exported, checked and passed, though its sources ended with a token that it had never seen there."""
    ours = Words(["<unk>", "<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(4, VOCAB))], None)
    config = small_config(eos_id=0, pad_id=1, bos_id=1)
    run = checkpoint(tmp_path / "run", config, Tokenizers(ours, ours))
    message = r"run: model\.bos_id=1, but the target tokenizer's bos is 2: give the model the tokenizer's$"
    with pytest.raises(ConfigError, match=message):
        export_checked(run, tmp_path / "bundle")
    config = small_config(eos_id=0, start_id=1)
    run = checkpoint(tmp_path / "run", config, Tokenizers(ours, ours))
    line = failed_line(run_here("export", run, "--out", tmp_path / "bundle"))
    assert line.endswith("run: model.eos_id=0, but the target tokenizer's eos is 3: give the model the tokenizer's")
    assert not (tmp_path / "bundle").exists()


def test_a_model_has_an_entry_for_every_id_of_its_tokenizers() -> None:
    require_fit(CONFIG, Tokenizers(words(), words()))
    few = dataclasses.replace(CONFIG, src_vocab=VOCAB - 1, pad_id=5, bos_id=5, start_id=5)
    with pytest.raises(ConfigError, match=f"model.src_vocab={VOCAB - 1} is smaller than the tokenizer's {VOCAB} entr"):
        require_fit(few, Tokenizers(words(), words()))
    with pytest.raises(ConfigError, match=r"here: model\.pad_id=59, but the target tokenizer's pad is 5"):
        require_fit(CONFIG, Tokenizers(words(), words(dataclasses.replace(OTHERS, pad=5))), "here: ")
    require_fit(CONFIG, Tokenizers(words(), words(dataclasses.replace(OTHERS, pad=-1, bos=-1))))


def test_other_special_ids_go_from_checkpoint_to_output(tmp_path: Path) -> None:
    """Against a loop without cache or engine over the whole prefix."""
    own = Tokenizers(words(), words(dataclasses.replace(OTHERS, unk=4)))
    run = checkpoint(tmp_path / "run", dataclasses.replace(CONFIG, start_id=30), own)
    assert export_checked(run, tmp_path / "bundle").passed
    opened = open_bundle(tmp_path / "bundle")
    assert opened.config.start_id == 30 and opened.manifest["model"]["start_id"] == 30
    assert opened.tokenizers().source.specials == OTHERS and opened.tokenizers().target.specials.unk == 4
    model = open_checkpoint(run).load_model()
    lines = ["w5 w6 w7", "w20", "zebra w9 w2 w3 w40 w41"]
    expected = []
    with torch.inference_mode():
        for line in lines:
            source = torch.tensor([[*(1 if w == "zebra" else int(w[1:]) for w in line.split()), OTHERS.eos]])
            target = [30]
            while len(target) <= 12 and target[-1] != OTHERS.eos:
                logits = model(source, torch.tensor([source.shape[1]]), torch.tensor([target]))
                target.append(int(logits[0, -1].argmax()))
            expected.append([token for token in target[1:] if token != OTHERS.eos])
    for backend in ("ort", "eager"):
        with load(tmp_path / "bundle", backend, max_tokens=12, threads=1) as translator:
            found = translator.translate(lines)
            assert [each.ids for each in found] == expected
            assert found[0].text == " ".join(f"w{i}" for i in expected[0] if i != OTHERS.pad)
            with pytest.raises(DataError, match="'zebra' is not in the vocabulary"):
                translator.translate(["w5"], ["w5 zebra"])
            assert translator.tokenizers.target.encode("w1 zebra") == [1, 4]


def test_a_bundle_whose_tokenizers_differ_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Also one that an earlier version exported although they did."""
    shutil.copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle/manifest.json").read_text())
    manifest["tokenizer"]["target"]["specials"]["eos"] = 0
    write_json(tmp_path / "bundle/manifest.json", manifest)
    with pytest.raises(
        ArtifactError, match=r"model\.eos_id=3, but the target tokenizer's eos is 0: .* export it again"
    ):
        load(tmp_path / "bundle")


# Older checkpoints


def test_checkpoints_of_every_version_are_read(tmp_path: Path) -> None:
    run = write_checkpoint(tmp_path / "run", small_config())
    header = json.loads((run / "checkpoint.json").read_text())
    assert header["version"] == 3 and header["model"]["start_id"] == 2
    for version in (2, 1):
        header["version"] = version
        header["model"].pop("start_id", None)
        for side in header["tokenizer"].values():
            side.pop("specials", None)
        header["sha256"] = digest(header)
        if version == 1:
            del header["sha256"]
        write_json(run / "checkpoint.json", header)
        opened = open_checkpoint(run)
        assert opened.config.start_id == 2 and opened.tokenizers.target.specials == OUR_SPECIALS
    header["version"] = 3
    write_json(run / "checkpoint.json", {**header, "sha256": digest(header)})
    with pytest.raises(ArtifactError, match=r"checkpoint\.json is damaged: .*specials.*; make the checkpoint again"):
        open_checkpoint(run)
