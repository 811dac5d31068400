"""Tokenizers of Hugging Face folders as transformers has them: tokens that were added, keys that change ids, spaces."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tformer_deploy.base.errors import ArtifactError, ConfigError, TformerError
from tformer_deploy.importers import compare
from tformer_deploy.importers.base import ImportOptions
from tformer_deploy.importers.hf_text import Text, read_text
from tformer_deploy.importers.run import import_checkpoint

from .hf_folders import FOLDERS, LINES, OPTIONS, entries, of_bart, pieces, write
from .params import long_but

PLAIN = ["<ORG>", "New York", "ab", "abc"]


def flagged() -> list[Any]:
    """Tokens of every flag; some overlap, and some are other characters once they are normalized."""
    from tokenizers import AddedToken

    return [
        *PLAIN[:-1],
        AddedToken("<L>", lstrip=True),
        AddedToken("<R>", rstrip=True),
        AddedToken("<B>", lstrip=True, rstrip=True),
        AddedToken("word", single_word=True),
        AddedToken("<N>", normalized=False),
        AddedToken("abc", normalized=False),
        AddedToken("Straße", single_word=True, lstrip=True),
        AddedToken("ﬁ<"),
    ]


@pytest.fixture(autouse=True)
def no_long_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models seldom end an output."""
    monkeypatch.setattr(compare, "MOST_STEPS", 8)


PARTS = [
    "\uff1cORG\uff1e",
    "Ⓐword",
    "½word",
    "fi<",
    "a",
    " ",
    "  ",
    "A man",
    "in",
    "'",
    " ,",
    " n't",
    "word.",
    "wordword",
]
PARTS += ["s word", "é", "word_", "Straßen", ".", "New   York", "the ladder", "abcd", "\t", "\u3000"]
OTHERS = set("Ⓐ\uff1c\uff1e½ﬁ\u3000\t")
"""What transformers does not normalize in mBART's plain text, see docs/import.md."""


def mixed(tokens: list[Any], count: int) -> list[str]:
    """Lines of tokens and parts of words, one behind the other."""
    rng, parts = random.Random(1), [*map(str, tokens), *PARTS]
    return ["".join(rng.choice(parts) for _ in range(rng.randint(1, 8))).strip() or "x" for _ in range(count)]


def nllb(path: Path) -> Path:
    """A model of M2M100's kind with NLLB's tokenizer: pieces by byte-pair encoding, languages behind them."""
    model = pieces(unk_id=0, bos_id=1, eos_id=2, pad_id=-1, model_type="bpe")
    size = len(entries(model)) + 1
    codes = ["eng_Latn", "deu_Latn", "fra_Latn"]
    added = {str(size + i): {"content": code, "special": True} for i, code in enumerate([*codes, "<mask>"])}
    made = of_bart("M2M100", size + 20, 2, activation_function="relu", scale_embedding=True)
    stated = {"tokenizer_class": "NllbTokenizer", "added_tokens_decoder": added, "additional_special_tokens": codes}
    return write(path, made, {"sentencepiece.bpe.model": model, "tokenizer_config.json": stated})


MAKE: dict[str, tuple[Callable[[Path], Path], dict[str, Any], dict[str, Any]]] = {
    **{
        name: (FOLDERS[name], {}, {})
        for name in ("marian", "m2m_100", "mbart", "plbart", "pegasus", "t5", "blenderbot")
    },
    "bart": (FOLDERS["bart"], {}, {}),
    "nllb": (nllb, {}, {}),
    "mbart-50": (FOLDERS["mbart"], {}, {"tokenizer_class": "MBart50Tokenizer"}),
    "codet5": (FOLDERS["bart"], {"model_type": "t5"}, {"tokenizer_class": "RobertaTokenizer"}),
    "bart, any class": (FOLDERS["bart"], {}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "umt5": (FOLDERS["t5"], {"model_type": "umt5"}, {}),
}
"""What makes a folder, and what is changed in its config.json and tokenizer_config.json."""
LANGUAGES = {**OPTIONS, "nllb": {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}, "mbart-50": OPTIONS["mbart"]}


def edit(file: Path, **values: Any) -> None:
    whole = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**whole, **values}))


def theirs_of(folder: Path, name: str) -> Any:
    import transformers

    languages = {} if name == "marian" else LANGUAGES.get(name, {})
    return transformers.AutoTokenizer.from_pretrained(folder, **languages)


def text_of(folder: Path, name: str) -> Text:
    config, settings = (json.loads((folder / f"{each}.json").read_text()) for each in ("config", "generation_config"))
    return read_text(folder, config["model_type"], ImportOptions(**LANGUAGES.get(name, {})), settings, config)


def changed(name: str, root: Path) -> Path:
    """A folder as MAKE has it."""
    make, config, stated = MAKE[name]
    folder = make(root / "folder")
    edit(folder / "tokenizer_config.json", **{key: value for key, value in stated.items() if name != "bart, any class"})
    if name == "umt5":  # whose class needs a tokenizer.json
        theirs_of(folder, name).save_pretrained(folder)
    elif name == "bart, any class":
        theirs_of(folder, name).save_pretrained(folder)
        (folder / "vocab.json").unlink()
        (folder / "merges.txt").unlink()
        edit(folder / "tokenizer_config.json", **stated)
    edit(folder / "config.json", **config)
    return folder


def assert_same_text(folder: Path, name: str, lines: list[str]) -> None:
    """Ids of sources, and the text of these ids and of random ones."""
    text, theirs, rng = text_of(folder, name), theirs_of(folder, name), random.Random(2)
    tokenizers = text.tokenizers
    for line in lines:
        if name == "mbart" and OTHERS & set(line):
            continue
        ids = theirs(text.before + line).input_ids
        assert tokenizers.source_ids(line) == ids, line
        for some in (ids, rng.choices(range(tokenizers.target.size), k=6)):
            expected = theirs.decode(some, skip_special_tokens=True)
            assert tokenizers.target_text(some).strip() == expected.strip(), some


@pytest.mark.parametrize("name", long_but(list(MAKE), "marian", "bart", "t5"))
def test_added_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Every flag, in ids and in text; transformers itself loses flags of PLBart's when it reads them."""
    folder = changed(name, tmp_path)
    theirs, tokens = theirs_of(folder, name), PLAIN if name == "plbart" else flagged()
    theirs.add_tokens(tokens)
    theirs.save_pretrained(folder)
    if name == "t5":  # as transformers 5 writes it; else the model is beside it
        (folder / "spiece.model").unlink()
    assert_same_text(folder, name, [*mixed(tokens, 600), *LINES[:50]])


def test_tokens_that_transformers_4_added(tmp_path: Path) -> None:
    """With flags in tokenizer_config.json; older still, without any in added_tokens.json."""
    folder = FOLDERS["t5"](tmp_path / "folder")
    theirs = theirs_of(folder, "t5")
    theirs.add_tokens(flagged())
    names = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    added = {str(i): {name: getattr(t, name) for name in names} for i, t in theirs.added_tokens_decoder.items()}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=added)
    assert_same_text(folder, "t5", mixed(flagged(), 200))
    folder = FOLDERS["marian"](tmp_path / "older")
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "added_tokens.json").write_text(json.dumps({token: size + i for i, token in enumerate(PLAIN)}))
    assert_same_text(folder, "marian", mixed(PLAIN, 200))


def with_tokens(folder: Path, name: str, tokens: list[Any]) -> Path:
    """The folder of a model that was resized for tokens, as transformers writes it."""
    import torch
    import transformers

    theirs = theirs_of(folder, name)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    size = len(theirs)
    theirs.add_tokens(tokens)
    model.resize_token_embeddings(len(theirs), mean_resizing=False)
    table = model.get_input_embeddings().weight.data
    table[size:] = table.std() * torch.randn(table[size:].shape, generator=torch.Generator().manual_seed(5))
    model.save_pretrained(folder)
    theirs.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", long_but(["t5", "marian", "bart"], "t5"))
def test_a_model_that_was_resized_for_tokens_is_imported(name: str, tmp_path: Path) -> None:
    """Ids, log-probabilities and outputs of transformers; outputs have the tokens."""
    folder = with_tokens(FOLDERS[name](tmp_path / "folder"), name, PLAIN)
    lines = [*LINES[:20], "A man <ORG> in New York", "<ORG>", "<ORG><ORG>abc ab"]
    given = ImportOptions(**LANGUAGES.get(name, {}))
    found, comparison = import_checkpoint("hf", folder, tmp_path / "run", given, lines)
    assert comparison.passed and comparison.lines == 23
    target = found.tokenizers.target
    org = target.id_of("<ORG>")
    assert org is not None and found.tokenizers.target_text([org] * 3) == "<ORG>" * 3
    assert target.encode("<ORG>") == [org] and target.specials.unk not in target.encode("New York")


@pytest.mark.parametrize("name", ["t5", "marian", "bart", "pegasus", "blenderbot"])
def test_special_tokens_of_somebody_are_named(name: str, tmp_path: Path, folders: dict[str, Path]) -> None:
    """Those of the model's kind are not."""
    folder = tmp_path / "folder"
    shutil.copytree(folders[name], folder)
    theirs = theirs_of(folder, name)
    for tokens in ([], ["<hl>", "<sep>"]):
        theirs.add_special_tokens({"additional_special_tokens": tokens}, replace_extra_special_tokens=False)
        theirs.save_pretrained(folder)
        notes = [note for note in text_of(folder, name).notes if "carry no language" not in note]
        assert [note.rsplit(": ", 1)[1] for note in notes] == (["<hl>, <sep>"] if tokens else [])


def test_lines_with_special_tokens_of_somebody_are_not_compared(tmp_path: Path) -> None:
    """They are text here, so the import would fail where nothing is wrong."""
    from tokenizers import AddedToken

    folder = with_tokens(FOLDERS["bart"](tmp_path / "folder"), "bart", [AddedToken("<hl>", special=True)])
    lines = [*LINES[:5], f"{LINES[5]} <hl> {LINES[6]}"]
    _, comparison = import_checkpoint("hf", folder, tmp_path / "run", ImportOptions(), lines)
    assert comparison.passed and comparison.lines == 5


def test_added_tokens_that_no_entry_has(tmp_path: Path) -> None:
    folder = FOLDERS["bart"](tmp_path / "folder")
    (folder / "added_tokens.json").write_text('{"<ORG>": 7}')
    with pytest.raises(ArtifactError, match=r"the added token '<ORG>' is not entry 7: copy it again"):
        text_of(folder, "bart")


@pytest.mark.parametrize(
    "name", long_but(["t5", "marian", "m2m_100", "mbart", "plbart", "pegasus", "bart", "nllb"], "t5")
)
def test_spaces_before_punctuation(name: str, tmp_path: Path) -> None:
    """Followed where transformers does: not in byte-pair encoding of the library `tokenizers`."""
    folder = changed(name, tmp_path)
    lines = ["A man , a dog . do n't", "is 't ' s", "a ' m , ! ?", "I 'm , you 're , we 've"]
    for clean_up in (True, False):
        edit(folder / "tokenizer_config.json", clean_up_tokenization_spaces=clean_up)
        assert_same_text(folder, name, [*lines, *mixed(["'s", " ' ", " !"], 100)])
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    edit(folder / "tokenizer_config.json", **{forced: True, "clean_up_tokenization_spaces": True})
    assert_same_text(folder, name, lines)


def test_nllb_with_the_language_behind_a_source(tmp_path: Path) -> None:
    folder = nllb(tmp_path / "folder")
    for legacy in (False, True):
        edit(folder / "tokenizer_config.json", legacy_behaviour=legacy)
        assert_same_text(folder, "nllb", LINES[:20])
        source = text_of(folder, "nllb").tokenizers
        assert (source.source_ids("a")[-1] == source.source.id_of("eng_Latn")) == legacy


@pytest.mark.long
def test_nllb_is_imported(tmp_path: Path) -> None:
    folder = nllb(tmp_path / "folder")
    edit(folder / "tokenizer_config.json", legacy_behaviour=True)
    given = ImportOptions(**LANGUAGES["nllb"])
    _, comparison = import_checkpoint("hf", folder, tmp_path / "run", given, LINES[:20])
    assert comparison.passed and comparison.lines == 20


IDS = [
    ("m2m_100", "sp_model_kwargs", {"add_eos": True}, r"sp_model_kwargs=.* changes the ids of M2M100Tokenizer"),
    ("plbart", "legacy", False, "legacy=False changes the ids of PLBartTokenizer"),
    ("pegasus", "offset", 0, "offset=0 changes the ids of PegasusTokenizer .* it must be 103"),
    ("pegasus", "mask_token_sent", None, "mask_token_sent=None"),
    ("t5", "eos_token", "\u2581in", r"eos_token '▁in' is \d+, but the model's eos_token_id is 1"),
    ("t5", "unk_token", "<pad>", "unk_token='<pad>' changes the ids of T5Tokenizer"),
    ("bart", "tokenizer_class", "BertTokenizer", "its text is split by BertTokenizer, which cannot be imported"),
    ("t5", "tokenizer_class", "ByT5Tokenizer", "its text is split by ByT5Tokenizer, which cannot be imported"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), IDS, ids=lambda it: str(it)[:20])
def test_keys_that_change_ids_are_refused_by_name(
    name: str, key: str, value: Any, message: str, tmp_path: Path, folders: dict[str, Path]
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(folders[name], folder)
    edit(folder / "tokenizer_config.json", **{key: value})
    with pytest.raises(ConfigError, match=message):
        text_of(folder, name)


FOLLOWED = [
    ("bart", {"cls_token": "<mask>", "sep_token": "<pad>"}),
    ("bart", {"add_prefix_space": True}),
    ("marian", {"unk_token": "<pad>"}),
    ("m2m_100", {"unk_token": "<pad>"}),
    ("blenderbot", {"add_prefix_space": False}),
]
HARMLESS: dict[str, Any] = {
    "add_bos_token": True,
    "add_eos_token": True,
    "model_max_length": 4,
    "padding_side": "left",
    "from_slow": True,
}
HARMLESS |= {"truncation_side": "left", "fuse_unk": True, "unk_id": 1, "trim_offsets": False, "extra_ids": 5}


@pytest.mark.parametrize(("name", "keys"), FOLLOWED, ids=str)
def test_keys_that_change_ids_are_followed(
    name: str, keys: dict[str, Any], tmp_path: Path, folders: dict[str, Path]
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(folders[name], folder)
    edit(folder / "tokenizer_config.json", **keys)
    text, theirs = text_of(folder, name), theirs_of(folder, name)
    for line in [*LINES[:20], "☃ x", " x"]:
        assert text.tokenizers.source_ids(line) == theirs(text.before + line).input_ids


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MAKE if "any" not in name])
def test_other_keys_change_no_ids(name: str, tmp_path: Path) -> None:
    """In the installed transformers."""
    folder = changed(name, tmp_path)
    edit(folder / "tokenizer_config.json", **HARMLESS)
    assert_same_text(folder, name, LINES[:20])


def test_a_class_that_goes_by_tokenizer_json(tmp_path: Path) -> None:
    """Whose model no reader knows."""
    folder = FOLDERS["bart"](tmp_path / "folder")
    edit(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edit(folder / "tokenizer.json", model={"type": "WordPiece", "vocab": {}}, added_tokens=[])
    with pytest.raises(ConfigError, match="its text is split by WordPiece, which cannot be imported"):
        text_of(folder, "bart")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders that are made once, when they are asked for."""
    root = tmp_path_factory.mktemp("folders")

    class Made(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = FOLDERS[name](root / name)
            return self[name]

    return Made()


@pytest.mark.long
def test_codet5_is_imported(tmp_path: Path, folders: dict[str, Path]) -> None:
    """T5 in front of byte-level BPE."""
    import transformers

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    vocab = json.loads((folders["bart"] / "vocab.json").read_text())
    model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=len(vocab), **sizes, **ids))
    model.generation_config = transformers.GenerationConfig(**ids, num_beams=4, max_length=30)
    files = {"vocab.json": vocab, "merges.txt": (folders["bart"] / "merges.txt").read_text()}
    files["tokenizer_config.json"] = {"tokenizer_class": "RobertaTokenizer"}
    folder = write(tmp_path / "folder", model, files, tables=1.5, layers=0.6)
    _, comparison = import_checkpoint("hf", folder, tmp_path / "run", None, LINES[:20])
    assert comparison.passed and comparison.lines == 20
    (folder / "vocab.json").unlink()
    with pytest.raises(TformerError, match=r"has no vocab\.json and no tokenizer\.json: download"):
        text_of(folder, "codet5")
