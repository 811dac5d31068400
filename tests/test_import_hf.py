"""`tformer import` of Hugging Face folders: encoder states, log-probabilities, tokens, ids and text of transformers."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tformer_deploy.base.errors import ArtifactError, ConfigError, ParityError, TformerError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.export.checked import export_checked
from tformer_deploy.importers import compare
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.hf_generation import NEUTRAL, SAMPLING, TECHNICAL, decoding_defaults
from tformer_deploy.importers.run import compare_again, import_checkpoint, recognised
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.translate.opening import TranslatorOptions, open_translator

from .conftest import small_config
from .hf_folders import FOLDERS, LINES, OPTIONS, SENTENCES, entries, fairseq_pieces, of_bart, of_t5, write
from .params import long_but

EXPORTED = {"marian": ["fp32-cpu"], "umt5": ["fp32", "fp32-cpu", "int8"], "mbart": ["fp32-cpu"]}
"""What the others export has the norms, positions, tables and activations of one of these."""


@pytest.fixture(autouse=True)
def no_long_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models seldom end an output, and what they repeat says nothing new."""
    monkeypatch.setattr(compare, "MOST_STEPS", 32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that are made once, when they are asked for."""
    root = tmp_path_factory.mktemp("folders")

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = FOLDERS[name](root / name)
            return self[name]

    return Made()


def imported(folder: Path, name: str, out: Path, **options: Any) -> Any:
    given = ImportOptions(**{**OPTIONS.get(name, {}), **options})
    return import_checkpoint("hf", folder, out, given, LINES[:180])


@pytest.mark.parametrize("name", long_but(list(FOLDERS), "t5"))
def test_what_is_imported_is_what_transformers_has(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Greedy, beams of 4 and 5 with the folder's own defaults, on text and random ids; then what some export."""
    assert recognised(folders[name]) == "hf"
    found, comparison = imported(folders[name], name, tmp_path / "run")
    assert comparison.passed and comparison.original and comparison.sentences == 200
    assert comparison.tokens.keys() == {"greedy", "beams 4", "beams 5"} and comparison.ties <= 2
    assert comparison.lines == (0 if name == "umt5" else 180)
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.decoding == found.decoding and "beams" in found.decoding
    if name not in EXPORTED:
        return
    report = export_checked(tmp_path / "run", tmp_path / "bundle", EXPORTED[name])
    assert report.passed
    bundle = open_bundle(tmp_path / "bundle")
    assert bundle.decoding == found.decoding
    outputs = []
    for backend in ("eager", "ort"):
        with open_translator(TranslatorOptions(bundle, backend, threads=1)) as translator:
            assert translator.options.beams == found.decoding["beams"]
            outputs.append([(result.ids, result.text) for result in translator.translate(SENTENCES)])
    assert outputs[0] == outputs[1]


NOISE = (
    "abc XYZ  ",
    "äöüßéñ",
    "日本語中文",
    "😀👍🏽",
    "12345.,;:!?'\"()",
    "ﬁﬂ①½",
    "▁_#@%&*",
    "Привет",
    "العربية",
    "\t\u200b\u3000",
)


def noise(count: int) -> list[str]:
    """Lines of everything, without what transformers takes for special tokens in a text."""
    rng = random.Random(1)
    lines = ("".join(rng.choice(rng.choice(NOISE)) for _ in range(rng.randint(1, 30))) for _ in range(count))
    return [line.strip() or "x" for line in lines]


@pytest.mark.parametrize("name", ["marian", "m2m_100", "plbart", "bart", "blenderbot", "mbart", "pegasus", "t5"])
def test_ids_and_text_of_noise(name: str, folders: dict[str, Path]) -> None:
    """Where transformers runs the folder's own files. It makes tokenizers of its own for mBART, Pegasus and T5, which
    leave out the normalization of a sentencepiece model: on plain text they agree."""
    from tformer_deploy.importers import hf, hf_original

    read = hf.read(folders[name], ImportOptions(**OPTIONS.get(name, {})))
    assert read.original is not None
    original = read.original()
    assert isinstance(original, hf_original.HfOriginal)
    lines = LINES if name in ("mbart", "pegasus", "t5") else [*LINES, *noise(500)]
    for line in lines:
        assert read.tokenizers.source_ids(line) == original.source_ids(line)
    for line in lines:
        ids = read.tokenizers.target.encode(line)
        theirs = original.text(ids)
        assert theirs is not None and read.tokenizers.target_text(ids).strip() == theirs.strip()


@pytest.mark.parametrize("name", ["t5", "mbart", "pegasus", "bart"])
def test_a_folder_that_transformers_has_written_anew(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """It has a tokenizer.json and nothing else; ids and text are those of transformers, which made it."""
    from tformer_deploy.importers import hf

    options = ImportOptions(**OPTIONS.get(name, {}))
    old = hf.read(folders[name], options)
    assert old.original is not None
    original: Any = old.original()
    folder = tmp_path / "folder"
    shutil.copytree(
        folders[name], folder, ignore=shutil.ignore_patterns("*.model", "vocab.json", "merges.txt", "*token*")
    )
    original._tokenizer.save_pretrained(folder)
    assert (folder / "tokenizer.json").is_file() and not [*folder.glob("*.model"), *folder.glob("vocab.json")]
    read = hf.read(folder, options)
    for line in LINES:
        assert read.tokenizers.source_ids(line) == original.source_ids(line) == old.tokenizers.source_ids(line)
        ids = read.tokenizers.target.encode(line)
        assert read.tokenizers.target_text(ids) == line
    assert read.decoding == old.decoding and read.config == old.config


SPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
REFUSED: dict[str, tuple[str, str, Any]] = {
    "NFKC": ("t5", "normalizer", {"type": "NFKC"}),
    "Lowercase": ("t5", "normalizer", {"type": "Sequence", "normalizers": [{"type": "Strip"}, {"type": "Lowercase"}]}),
    "Replace": ("t5", "normalizer", {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}),
    "Prepend": ("t5", "normalizer", {"type": "Prepend", "prepend": "\u2581"}),
    "ByteLevel": ("t5", "pre_tokenizer", BYTES),
    "Digits": ("t5", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, SPACE]}),
    "none": ("t5", "pre_tokenizer", None),
    "WhitespaceSplit": ("t5", "pre_tokenizer", {"type": "WhitespaceSplit"}),
    "never": ("t5", "pre_tokenizer", {**SPACE, "prepend_scheme": "never"}),
    "NFC": ("bart", "normalizer", {"type": "NFC"}),
    "Split": ("bart", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "Split"}, BYTES]}),
}


@pytest.fixture(scope="module")
def written_anew(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of T5 and BART with a tokenizer.json alone."""
    import transformers

    made = {}
    for name in ("t5", "bart"):
        made[name] = tmp_path_factory.mktemp("anew") / name
        tokenizer = transformers.AutoTokenizer.from_pretrained(folders[name])
        ignored = shutil.ignore_patterns("*.model", "vocab.json", "merges.txt", "*token*")
        shutil.copytree(folders[name], made[name], ignore=ignored)
        tokenizer.save_pretrained(made[name])
    return made


@pytest.mark.parametrize(("folder", "part", "value"), REFUSED.values(), ids=REFUSED)
def test_what_a_rebuilt_tokenizer_cannot_do_is_refused(
    folder: str, part: str, value: Any, written_anew: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = edited(written_anew[folder], tmp_path / "folder", "tokenizer.json", lambda t: {**t, part: value})
    what = f"a {part.replace('_', '-')} that cannot be imported, .*{request.node.callspec.id}"
    with pytest.raises(ArtifactError, match=what):
        import_checkpoint("hf", path, tmp_path / "run", comparing=False)


def test_spaces_that_published_tokenizers_normalize(written_anew: dict[str, Path], tmp_path: Path) -> None:
    """As sentencepiece does it anyway."""
    double = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}

    def change(tokenizer: dict[str, Any]) -> dict[str, Any]:
        strip = {"type": "Strip", "strip_left": False, "strip_right": True}
        steps = [tokenizer["normalizer"], strip, double]
        return {**tokenizer, "normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": SPACE}

    folder = edited(written_anew["t5"], tmp_path / "folder", "tokenizer.json", change)
    comparison = import_checkpoint("hf", folder, tmp_path / "run", None, [*LINES[:20], "a  man   in "])[1]
    assert comparison.passed and comparison.lines == 21


@pytest.mark.parametrize("name", ["bart", "blenderbot", "tokenizer.json"])
def test_a_space_before_a_text(
    name: str, folders: dict[str, Path], written_anew: dict[str, Path], tmp_path: Path
) -> None:
    """The other choice than the family's own."""
    wanted = name != "blenderbot"
    if name == "tokenizer.json":
        change = lambda t: {**t, "pre_tokenizer": {**t["pre_tokenizer"], "add_prefix_space": True}}  # noqa: E731
        folder = edited(written_anew["bart"], tmp_path / "folder", name, change)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        del config["add_prefix_space"]
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "TokenizersBackend"}))
    else:
        change = lambda t: {**t, "add_prefix_space": wanted}  # noqa: E731
        folder = edited(folders[name], tmp_path / "folder", "tokenizer_config.json", change)
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run", None, LINES[:20])
    assert comparison.passed and comparison.lines == 20
    encode = found.tokenizers.source.encode
    assert (encode("Two men") == encode(" Two men")) == wanted


@pytest.mark.long
def test_tokenizers_are_compared_without_a_text_too(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer_deploy.importers.hf_original import HfOriginal

    comparison = import_checkpoint("hf", folders["bart"], tmp_path / "run")[1]
    assert comparison.lines == len(compare.LINES) == 6 and "ids and text of 6 lines" in str(comparison)
    monkeypatch.setattr(HfOriginal, "source_ids", lambda self, text: [7])
    with pytest.raises(ParityError, match=r"'A man in .*' is \[7\] there"):
        import_checkpoint("hf", folders["bart"], tmp_path / "other")


@pytest.mark.parametrize("name", [*OPTIONS, "pegasus", "blenderbot", "t5", "mt5", "fsmt"])
def test_built_in_lines_have_the_same_ids(name: str, folders: dict[str, Path]) -> None:
    """In all tokenizers: an import must not fail for them."""
    from tformer_deploy.importers import hf

    read = hf.read(folders[name], ImportOptions(**OPTIONS.get(name, {})))
    assert read.original is not None
    original = read.original()
    for line in compare.LINES:
        assert read.tokenizers.source_ids(line) == original.source_ids(line)


def test_text_of_fsmt_is_not_compared(folders: dict[str, Path]) -> None:
    """Where sacremoses is installed, transformers puts words and punctuation together again."""
    from tformer_deploy.importers import hf

    read = hf.read(folders["fsmt"], ImportOptions())
    assert read.original is not None
    original: Any = read.original()
    original._tokenizer = "loaded"
    assert original.text([5, 6]) is None


def test_families_have_the_defaults_of_transformers() -> None:
    import transformers

    from tformer_deploy.importers import hf

    for kind, family in hf.FAMILIES.items():
        theirs: Any = transformers.CONFIG_MAPPING[kind]()
        assert (family.activation, family.scaled) == (theirs.activation_function, theirs.scale_embedding), kind
    for kind, projection in hf.T5_FAMILY.items():
        assert projection == transformers.CONFIG_MAPPING[kind]().feed_forward_proj  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FOLDERS)
def test_what_config_json_omits_is_what_transformers_takes(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Each key is refused where it is not there, or read as the default of the model type's config class."""
    import transformers

    from tformer_deploy.importers import hf

    folder = tmp_path / "folder"
    shutil.copytree(folders[name], folder)
    whole = json.loads((folder / "config.json").read_text())
    default = transformers.CONFIG_MAPPING[whole["model_type"]]()

    def read(config: dict[str, Any]) -> Any:
        (folder / "config.json").write_text(json.dumps(config))
        try:
            found = hf.read(folder, ImportOptions(**OPTIONS.get(name, {})))
        except TformerError as error:
            return error
        return found.config, found.decoding, found.tokenizers.target.specials

    for key in whole.keys() - {"model_type"}:
        omitted = read({other: value for other, value in whole.items() if other != key})
        if not isinstance(omitted, TformerError):
            assert omitted == read({**whole, key: getattr(default, key, None)}), key


def test_what_the_folder_says_is_not_set(folders: dict[str, Path], tmp_path: Path) -> None:
    """`heads` alone would change the decoder and not the encoder. Learned positions end where their table ends."""
    with pytest.raises(ConfigError, match=r"--set model.heads: config.json says it; max_positions, .* can be set"):
        import_checkpoint("hf", folders["bart"], tmp_path / "run", ImportOptions(model={"heads": 8}))
    with pytest.raises(ArtifactError, match=r"src_positions would be \(80, 32\), not \(90, 32\)"):
        import_checkpoint("hf", folders["bart"], tmp_path / "run", ImportOptions(model={"max_positions": 90}))
    for name, positions in (("bart", 40), ("t5", 700)):
        options = ImportOptions(model={"max_positions": positions})
        made, _ = import_checkpoint("hf", folders[name], tmp_path / name, options, comparing=False)
        assert made.config.max_positions == positions


def test_special_tokens_in_a_text_are_text(folders: dict[str, Path]) -> None:
    """transformers reads them as what they name, so that a line can end its own sentence."""
    from tformer_deploy.importers import hf

    for name in ("marian", "bart", "t5"):
        tokenizers = hf.read(folders[name], ImportOptions(**OPTIONS.get(name, {}))).tokenizers
        for special in ("</s>", "<pad>", "<s>", ">>fra<<", "<extra_id_0>"):
            ids = tokenizers.source.encode(f"one {special} two")
            assert not set(ids) & ({*tokenizers.source.specials.ids} - {tokenizers.source.specials.unk})


def test_defaults_of_the_folder_are_overridden(folders: dict[str, Path], bundle: Path, tmp_path: Path) -> None:
    """In a bundle of another model, which saves an export."""
    found = import_checkpoint("hf", folders["bart"], tmp_path / "run", comparing=False)[0]
    shutil.copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((bundle / "manifest.json").read_text())
    (tmp_path / "bundle/manifest.json").write_text(json.dumps({**manifest, "decoding": found.decoding}))
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"beams": 4, "length_penalty": 2.0, "no_repeat_ngram": 3, "forced_end": True, "first_ids": (0,)}),
        ({"length_penalty": 0.5}, {"beams": 4, "length_penalty": 0.5}),
        ({"beams": 1}, {"beams": 1, "length_penalty": 1.0, "min_tokens": 8}),
        ({"sampling": True}, {"beams": 1, "sampling": True, "no_repeat_ngram": 3}),
        ({"first_ids": ()}, {"first_ids": ()}),
    ]
    for decoding, expected in asked:
        with open_translator(TranslatorOptions(tmp_path / "bundle", decoding=decoding)) as translator:
            assert {name: getattr(translator.options, name) for name in expected} == expected
            assert translator.score(["w5 w6"], ["w7"])[0]


def edited(folder: Path, out: Path, file: str, change: Any) -> Path:
    """A copy of a folder in which one file is another."""
    shutil.copytree(folder, out)
    if change is None:
        (out / file).unlink()
    elif callable(change):
        (out / file).write_text(json.dumps(change(json.loads((out / file).read_text()))))
    else:
        (out / file).write_text(change)
    return out


BAD: dict[str, tuple[str, str, Any, str]] = {
    "no weights": ("marian", "model.safetensors", None, "has no model.safetensors and no pytorch_model.bin"),
    "damaged weights": ("marian", "model.safetensors", "x" * 100, "cannot be read"),
    "damaged config": ("marian", "config.json", "{", "config.json cannot be read"),
    "a list": ("marian", "config.json", "[]", "is no JSON object"),
    "no model type": ("marian", "config.json", lambda c: {"d_model": 32}, "config.json names no model_type: copy it"),
    "no width": ("marian", "config.json", lambda c: {**c, "d_model": None}, "has no whole number 'd_model'"),
    "another width": ("marian", "config.json", lambda c: {**c, "d_model": 36}, r"would be \(.*\), not \(.*\)"),
    "an activation": (
        "bart",
        "config.json",
        lambda c: {**c, "activation_function": "sin"},
        "activation 'sin' is not one",
    ),
    "more layers": ("bart", "config.json", lambda c: {**c, "encoder_layers": 3}, "no tensor 'model.encoder.layers.2"),
    "fewer layers": (
        "bart",
        "config.json",
        lambda c: {**c, "decoder_layers": 1},
        "tensors that this format does not know",
    ),
    "no tokenizer": ("marian", "source.spm", None, "source.spm is missing"),
    "no vocabulary": ("bart", "vocab.json", None, "has no vocab.json"),
    "added far away": (
        "bart",
        "added_tokens.json",
        '{"x": 1000000000}',
        "the added token 'x' has the id 1000000000: copy it again",
    ),
    "added before all": ("bart", "added_tokens.json", '{"x": -5}', "the added token 'x' has the id -5"),
    "added nowhere": ("bart", "added_tokens.json", '{"x": "a"}', "its added tokens are damaged"),
    "other ids": (
        "bart",
        "vocab.json",
        lambda v: {w: i for i, w in enumerate(v)} | {"x": 10**9},
        "is not a vocabulary",
    ),
}


@pytest.mark.parametrize(("name", "file", "change", "message"), BAD.values(), ids=BAD)
def test_a_folder_that_cannot_be_read_is_one_line_and_leaves_nothing(
    name: str, file: str, change: Any, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = edited(folders[name], tmp_path / "folder", file, change)
    with pytest.raises(TformerError, match=message):
        imported(folder, name, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "source.spm", "vocab.json", "config.json"])
def test_pointers_of_git_lfs_are_named(file: str, folders: dict[str, Path], tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    folder = tmp_path / "folder"
    shutil.copytree(folders["marian"], folder)
    if file == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / file).write_text(pointer)
    with pytest.raises(
        ArtifactError, match=rf"{file} is a pointer of Git LFS, not the file: run git lfs pull where it"
    ):
        imported(folder, "marian", tmp_path / "run")


UNLISTED: dict[str, tuple[dict[str, Any], str]] = {
    "led": ({"is_encoder_decoder": True}, "nor can it be exported as a module of your own: its code chooses by values"),
    "prophetnet": ({}, "nor can it be exported as a module of your own: its code chooses by values"),
    "blenderbot-small": ({}, "export it as a module of your own, see docs/your-model.md"),
    "whisper": ({"num_mel_bins": 80}, "its source is sound or an image, which tformer cannot export"),
    "vision-encoder-decoder": ({}, "its source is sound or an image, which tformer cannot export"),
    "donut": ({"encoder": {"model_type": "swin", "image_size": 224}}, "its source is sound or an image"),
    "gpt2": ({"architectures": ["GPT2LMHeadModel"]}, "if it is an encoder-decoder of text"),
    "llama": ({"architectures": ["LlamaForCausalLM"]}, "it is no encoder-decoder"),
}


@pytest.mark.parametrize("kind", UNLISTED)
def test_other_families_are_refused_by_their_type(kind: str, tmp_path: Path) -> None:
    """Also where no format is named; a folder that is of another format too is that format's."""
    more, way = UNLISTED[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **more}))
    for refuse in (recognised, lambda path: import_checkpoint("hf", path, path / "run")):
        with pytest.raises(ArtifactError, match=f"model type '{kind}' cannot be imported, only marian, .*: .*{way}"):
            refuse(tmp_path)
    for name in ("model.bin", "shared_vocabulary.json"):
        (tmp_path / name).touch()
    assert recognised(tmp_path) == "ctranslate2"


@pytest.mark.parametrize("shortest", [{"min_length": 100}, {"min_new_tokens": 100}])
def test_a_shortest_output_above_what_is_compared(
    shortest: dict[str, int], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may end at the last token, not before; an end that is likely is what both end with there."""
    from safetensors.torch import load_file, save_file

    monkeypatch.setattr(compare, "MOST_STEPS", 8)
    change = lambda g: {**g, "max_length": 200, "min_length": None, "forced_eos_token_id": None, **shortest}  # noqa: E731
    folder = edited(folders["bart"], tmp_path / "folder", "generation_config.json", change)
    tensors = load_file(folder / "model.safetensors")
    tensors["final_logits_bias"][0, 2] += 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run")
    assert found.decoding["min_tokens"] == 80
    assert comparison.passed and comparison.tokens["greedy"] == "60 of 60", comparison


OLDER = {"mbart": "MBartTokenizer", "mbart-50": "MBart50Tokenizer", "plbart": "PLBartTokenizer"}


def older(name: str, path: Path) -> tuple[Path, list[str]]:
    """A folder without ids of its languages, and these."""
    from transformers.models.mbart50 import tokenization_mbart50

    codes = list(tokenization_mbart50.FAIRSEQ_LANGUAGE_CODES)
    codes = {"mbart": codes[:25], "plbart": ["__java__", "__python__", "__en_XX__"]}.get(name, codes)
    model = fairseq_pieces()
    size = len(entries(model)) + 1 + len(codes) + 1
    kind = "PLBart" if name == "plbart" else "MBart"
    made = of_bart(kind, size, size - 2, activation_function="gelu", scale_embedding=True)
    stated = {"tokenizer_class": OLDER.get(name, "NllbTokenizer"), "additional_special_tokens": codes}
    write(path, made, {"sentencepiece.bpe.model": model, "tokenizer_config.json": stated}, tables=0.3)
    return path, codes


@pytest.mark.parametrize("name", OLDER)
def test_languages_of_older_folders_are_numbered(name: str, tmp_path: Path) -> None:
    """Behind the entries, then <mask>, as transformers numbers them."""
    import transformers

    folder, codes = older(name, tmp_path / "folder")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    options = ImportOptions(src_lang=codes[0], tgt_lang=codes[-1])
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run", options, LINES[:20])
    assert comparison.passed and comparison.lines == 20, comparison
    for token in (*codes, "<mask>"):
        assert found.tokenizers.target.id_of(token) == theirs.convert_tokens_to_ids(token)
    wrong = ImportOptions(src_lang="xx", tgt_lang=codes[0])
    with pytest.raises(ConfigError, match=f"the model needs one of its {len(codes)} languages, such as"):
        import_checkpoint("hf", folder, tmp_path / "other", wrong)


@pytest.mark.parametrize("name", ["mbart", "nllb"])
def test_languages_without_ids_are_one_line(name: str, tmp_path: Path) -> None:
    """Where no file names them, and for NLLB: transformers 5 gives other ids than its models were trained with."""
    folder, codes = older(name, tmp_path / "folder")
    if name == "mbart":
        (folder / "tokenizer_config.json").unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "m2m_100"}))
    with pytest.raises(ArtifactError, match="does not say the ids of its languages: load its tokenizer once with"):
        import_checkpoint("hf", folder, tmp_path / "run", ImportOptions(src_lang=codes[0], tgt_lang=codes[1]))


@pytest.mark.long
def test_languages(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, wrong in (
        ("m2m_100", {"tgt_lang": "xx"}),
        ("mbart", {"src_lang": ""}),
        ("plbart", {"tgt_lang": "latin"}),
    ):
        with pytest.raises(ConfigError, match=r"the model needs one of its .* languages, such as"):
            imported(folders[name], name, tmp_path / "run", **wrong)
    with pytest.raises(ConfigError, match="--tgt-lang spa: the model has >>deu<<, >>fra<<"):
        imported(folders["marian"], "marian", tmp_path / "run", tgt_lang="spa")
    found, _ = imported(folders["marian"], "marian", tmp_path / "run", tgt_lang="")
    assert found.notes == ["sources carry no language: say which with --tgt-lang, such as deu"]


@pytest.mark.long
def test_check_compares_with_the_original_again(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is read again, with what was said at import; a folder that has changed since is another model."""
    folder = tmp_path / "folder"
    shutil.copytree(folders["marian"], folder)
    imported(folder, "marian", tmp_path / "run")
    checkpoint = open_checkpoint(tmp_path / "run")
    assert compare_again(checkpoint, SENTENCES).passed
    write_changed(folder)
    found = compare_again(checkpoint, SENTENCES)
    assert not found.passed and "differ by" in found.failures[0]
    shutil.rmtree(folder)
    with pytest.raises(ArtifactError, match="is not there: put it back"):
        compare_again(checkpoint)
    shutil.copytree(folders["marian"], folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="cannot be compared with the original: transformers is not installed"):
        compare_again(checkpoint)


@pytest.mark.long
def test_an_original_that_gives_no_numbers_is_no_match(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tformer_deploy.importers.hf_original import HfOriginal

    whole = HfOriginal.log_probs
    monkeypatch.setattr(HfOriginal, "log_probs", lambda *given: whole(*given) * float("nan"))
    with pytest.raises(ParityError, match="log-probabilities differ by nan"):
        imported(folders["bart"], "bart", tmp_path / "run")


@pytest.mark.long
def test_a_folder_of_links(folders: dict[str, Path], tmp_path: Path) -> None:
    """As in the cache of Hugging Face, whose files lie elsewhere."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in folders["marian"].iterdir():
        (folder / path.name).symlink_to(path)
    _, comparison = imported(folder, "marian", tmp_path / "run")
    assert comparison.passed and comparison.lines


def write_changed(folder: Path) -> None:
    """One number of one matrix is another."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.encoder.layers.0.fc1.weight"][0, 0] += 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_wrong_mapping_is_noticed(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tformer_deploy.importers import hf

    monkeypatch.setattr(hf, "ATTENTION", ("k_proj", "q_proj", "v_proj", "out_proj"))
    with pytest.raises(ParityError, match=r"not written, it differs from BartFor.*: .*differ by"):
        imported(folders["bart"], "bart", tmp_path / "run")
    assert not (tmp_path / "run").exists()


BEAM = {"stop": "estimate", "length_penalty": 1.0}
"""What `generate` has where a folder says nothing."""


def test_what_generate_has_and_we_have_not_is_said() -> None:
    settings = {"num_beam_groups": 2, "bad_words_ids": [[1], [2, 3]], "repetition_penalty": 1.2, "do_sample": True}
    settings |= {"top_p": 0.9, "forced_eos_token_id": 7, "num_return_sequences": 1}
    found, notes = decoding_defaults({**settings, "eos_token_id": [3, 5]}, (), small_config())
    assert found == {**BEAM, "suppress": [1], "bad_words": [[2, 3]], "repetition_penalty": 1.2, "end_ids": [3, 5]}
    assert [note.split(" ")[0] for note in notes] == [
        "num_beam_groups=2",
        "forced_eos_token_id=7",
        "repetition_penalty",
        "do_sample=True,",
    ]
    assert "top_p=0.9" in notes[-1]


KEPT = {
    "num_beams",
    "length_penalty",
    "no_repeat_ngram_size",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "early_stopping",
    "do_sample",
}
KEPT |= {"repetition_penalty", "bad_words_ids", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"}
KEPT |= {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
ELSEWHERE = {"use_cache", "transformers_version", "is_assistant", "num_assistant_tokens", "max_matching_ngram_size"}
ELSEWHERE |= {"num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind"}
ELSEWHERE |= {"target_lookbehind", "assistant_ensemble_weight", "speculation_type", "disable_compile"}
"""What matters where something else is set that we do not let be."""


def test_every_setting_of_generate_is_known() -> None:
    """A newer transformers may have more."""
    import transformers

    names = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    assert not names - {*KEPT, *NEUTRAL, *SAMPLING, *TECHNICAL, *ELSEWHERE}


LEFT_OUT: dict[str, Any] = {
    "encoder_repetition_penalty": 3.0,
    "exponential_decay_length_penalty": [3, 1.5],
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "forced_decoder_ids": [[1, 5]],
    "begin_suppress_tokens": list(range(2, 80)),
    "sequence_bias": [[[5], 40.0]],
    "guidance_scale": 1.5,
    "renormalize_logits": True,
    "forced_eos_token_id": 5,
}
"""Each changes outputs of transformers, or is an error there without this importer."""


@pytest.mark.parametrize("beams", [1, 4])
def test_the_original_is_compared_without_what_is_left_out(
    beams: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    more = {**LEFT_OUT, "repetition_penalty": 1.5, "top_k": 4, "return_dict_in_generate": True, "num_beams": beams}
    more |= {"output_scores": True, "length_penalty": 2.0, "num_return_sequences": beams // 2 or None}
    change = lambda g: {**g, **more, "bad_words_ids": [*g["bad_words_ids"], [5, 6]]}  # noqa: E731
    folder = edited(folders["marian"], tmp_path / "folder", "generation_config.json", change)
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run", ImportOptions(tgt_lang="deu"))
    assert comparison.passed and comparison.tokens.keys() == {"greedy", "beams 4", "beams 5"}
    assert [note.split("=")[0] for note in found.notes[:-1]] == [
        name
        for name in LEFT_OUT
        if beams > 1 or name != "num_return_sequences"  # which transformers refuses
    ]
    assert found.notes[-1].startswith("repetition_penalty ") and found.decoding["bad_words"] == [[5, 6]]
    assert found.decoding["repetition_penalty"] == 1.5


def test_config_json_may_hold_what_is_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """As in folders older than generation_config.json."""
    change = lambda c: {**c, "num_beams": 4, "num_return_sequences": 2, "force_bos_token_to_be_generated": True}  # noqa: E731
    folder = edited(folders["bart"], tmp_path / "folder", "config.json", change)
    (folder / "generation_config.json").unlink()
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run")
    assert comparison.passed and found.notes[0].startswith("num_return_sequences=2 has no counterpart")
    assert found.decoding["first_ids"] == [0]


STATED: dict[str, dict[str, Any]] = {
    "a forced first token": {"forced_bos_token_id": None},
    "nothing but ids": dict.fromkeys(
        ("forced_bos_token_id", "forced_eos_token_id", "num_beams", "early_stopping", "length_penalty", "min_length")
    ),
    "another start": {"decoder_start_token_id": 7},
    "no start": {"decoder_start_token_id": None},
    "other ends": {"eos_token_id": [9, 2], "forced_eos_token_id": [9, 2]},
    "another pad": {"pad_token_id": 2},
    "an end that is a bad word": {"bad_words_ids": [[2], [5]]},
    "short": {"max_length": 7, "min_length": 3},
    "new tokens": {"max_length": None, "min_length": None, "max_new_tokens": 6, "min_new_tokens": 4},
    "a beam's options without a beam": {"num_beams": None, "length_penalty": 3.0, "early_stopping": "never"},
}
"""Keys of generation_config.json, where config.json says otherwise."""


@pytest.mark.parametrize("stated", long_but(list(STATED), "a forced first token", "short"))
def test_generation_config_is_all_that_generate_reads(
    stated: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other values in config.json are read by neither side; the original gets nothing but its folder."""
    monkeypatch.setattr(compare, "MOST_STEPS", 10)
    folder = edited(folders["bart"], tmp_path / "folder", "generation_config.json", lambda g: {**g, **STATED[stated]})
    config = json.loads((folder / "config.json").read_text())
    others = {"forced_bos_token_id": 5, "num_beams": 3, "suppress_tokens": [4], "no_repeat_ngram_size": 2}
    more = {"task_specific_params": {"summarization": {"length_penalty": 2.0, "num_beams": 4}}}
    (folder / "config.json").write_text(json.dumps({**config, **others, **more}))
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run", None, LINES[:3])
    assert comparison.passed and comparison.original and comparison.tokens.keys() == {"greedy", "beams 4", "beams 5"}
    forced = "forced_bos_token_id" not in STATED[stated]
    assert found.decoding.get("first_ids") == ([0] if forced else None)
    assert found.config.start_id == {"another start": 7, "no start": 0}.get(stated, 2)
    assert found.config.eos_id == 2 and found.config.pad_id == 1
    assert [note.split(" of ")[0] for note in found.notes] == ["task_specific_params (summarization)"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["marian", "m2m_100", "mbart", "plbart", "fsmt", "pegasus", "blenderbot", "t5"])
def test_a_forced_first_token_of_every_family(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Of generation_config.json, or of config.json where that is all; a language that is asked for comes before it."""
    for file, other in (("generation_config.json", "config.json"), ("config.json", None)):
        folder = edited(folders[name], tmp_path / file, file, lambda c: {**c, "forced_bos_token_id": 7})
        if other is None:
            (folder / "generation_config.json").unlink()
        options = ImportOptions(**OPTIONS.get(name, {}))
        found, comparison = import_checkpoint("hf", folder, tmp_path / "run", options, LINES[:3], force=True)
        assert comparison.passed and comparison.original
        assert (found.decoding["first_ids"] == [7]) == (name != "m2m_100")


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "no end": ({"eos_token_id": None}, "generation_config.json has no eos_token_id, so that no output would end: add"),
    "no start": (
        {"decoder_start_token_id": None, "bos_token_id": None},
        "generation_config.json has no decoder_start_token_id, with which each output begins: add it",
    ),
    "a text": ({"num_beams": "four"}, "generation_config.json: num_beams='four' is of a wrong type: copy it again"),
}


@pytest.mark.parametrize("stated", UNUSABLE)
def test_a_generation_config_with_which_nothing_begins_or_ends(
    stated: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Although config.json has those ids: transformers refuses it, or never ends an output."""
    changes, message = UNUSABLE[stated]
    folder = edited(folders["bart"], tmp_path / "folder", "generation_config.json", lambda g: {**g, **changes})
    with pytest.raises(ArtifactError, match=message):
        import_checkpoint("hf", folder, tmp_path / "run", comparing=False)


def test_an_original_that_fails_says_so(folders: dict[str, Path], tmp_path: Path) -> None:
    """transformers refuses such a folder when it loads it."""
    change = lambda g: {**g, "num_beams": 1, "num_return_sequences": 2}  # noqa: E731
    folder = edited(folders["t5"], tmp_path / "folder", "generation_config.json", change)
    with pytest.raises(ArtifactError, match=r"the original code itself fails, ValueError: .*: mend what it reads, or"):
        import_checkpoint("hf", folder, tmp_path / "run")


@pytest.mark.parametrize("kind", long_but(["T5", "MT5", "UMT5"], "T5"))
def test_more_decoder_than_encoder_layers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in t5-efficient: the cache of transformers 5 has as many layers as the encoder."""
    monkeypatch.setattr(compare, "MOST_STEPS", 8)
    folder = of_t5(tmp_path / "folder", kind, num_layers=1, num_decoder_layers=3)
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run", None, LINES[:3])
    assert (found.config.encoder_layers, found.config.decoder_layers) == (1, 3)
    assert comparison.passed and comparison.original and len(comparison.tokens) == 3
    said = capsys.readouterr().err
    assert said.count("compared with use_cache=False") == 1 and "fails, IndexError" in said


def test_what_t5_rounds_itself_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms compute in fp32 in a model of fp64 too; large ones make 1e-3 of that. What fp64 shows is still refused.

    Sizes whose roots are powers of two: import multiplies weights by them.
    """
    monkeypatch.setattr(compare, "MOST_STEPS", 4)
    torch.manual_seed(1)
    folder = of_t5(tmp_path / "folder", "UMT5", d_model=64, d_kv=16)
    weights = load_file(folder / "model.safetensors")
    larger = {name: 3 * each if "layer_norm" in name else each for name, each in weights.items()}
    save_file(larger, folder / "model.safetensors", metadata={"format": "pt"})
    imported, found = import_checkpoint("hf", folder, tmp_path / "run", None, LINES[:1])
    assert found.passed and found.log_probs > compare.LIMIT and found.rounding > compare.LIMIT
    checkpoint = open_checkpoint(tmp_path / "run")
    original: Any = imported.original() if imported.original else None
    norm = original.model.encoder.block[0].layer[0].layer_norm
    numbers = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with compare.KeepDouble():
        exact = copy.deepcopy(norm).double()(numbers)
    plain = norm.weight.double() * numbers / (numbers.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    assert (exact - plain).abs().max() < 1e-13
    with torch.no_grad():
        norm.weight[5] *= 1.00001  # within what fp32 may be apart
    wrong = compare.compare(original, checkpoint.load_model(), checkpoint.tokenizers, {}, [])
    assert wrong.failures and all(each.endswith("in fp64 too") for each in wrong.failures)


def test_what_is_left_out_is_said_where_the_comparison_fails(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tformer_deploy.importers.hf_original import HfOriginal

    folder = edited(
        folders["bart"], tmp_path / "folder", "generation_config.json", lambda g: {**g, "guidance_scale": 2.0}
    )
    monkeypatch.setattr(HfOriginal, "generate", lambda self, ids, *_: [[5]] * len(ids))
    with pytest.raises(ParityError, match="differs from BartFor"):
        import_checkpoint("hf", folder, tmp_path / "run")
    assert "guidance_scale=2.0 has no counterpart and is left out" in capsys.readouterr().err


def test_lengths_of_generate() -> None:
    """Theirs count the start token, ours the end token."""
    config = small_config(max_positions=64)
    for settings, expected in (
        ({"max_length": 20, "min_length": 5}, {"max_tokens": 19, "min_tokens": 5}),
        ({"max_new_tokens": 20, "min_new_tokens": 5}, {"max_tokens": 20, "min_tokens": 6}),
        ({"max_length": 20, "max_new_tokens": 30}, {"max_tokens": 30}),
        ({"max_length": 512}, {"max_tokens": 64}),
        ({}, {}),
    ):
        settings["eos_token_id"] = config.eos_id
        assert decoding_defaults(settings, (), config)[0] == {**BEAM, **expected}


def test_without_transformers_nothing_is_compared_and_that_is_said(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, comparison = imported(folders["bart"], "bart", tmp_path / "run")
    assert str(comparison) == (
        "NOT COMPARED with the original: transformers is not installed: pip install transformers, and import again"
    )


def test_old_files(folders: dict[str, Path], tmp_path: Path) -> None:
    """Weights in shards and as .bin; no generation_config.json."""
    import torch
    from safetensors.torch import load_file

    folder = edited(folders["bart"], tmp_path / "folder", "generation_config.json", None)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, shards = sorted(tensors), ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")
    places = {name: shards[i % 2] for i, name in enumerate(names)}
    for shard in shards:
        torch.save({name: tensors[name] for name in names if places[name] == shard}, folder / shard)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run", comparing=False)
    assert found.config.decoder_layers == 2 and "--no-compare" in str(comparison)
    (folder / shards[0]).unlink()
    with pytest.raises(ArtifactError, match=r"00001-of-00002.bin is missing"):
        import_checkpoint("hf", folder, tmp_path / "other")
