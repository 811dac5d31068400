"""Tokenizers: reserved ids, round trips, files, and the messages for what cannot be learned or read."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy.base.errors import ArtifactError, ConfigError
from tformer_deploy.bundle.text import (
    SPECIALS,
    AddedToken,
    Around,
    ByteBpe,
    PieceList,
    SentencePiece,
    Specials,
    Tokenizer,
    Tokenizers,
    WordBpe,
    Words,
    Wrapped,
    load_tokenizers,
    tokenizer_files,
    train_tokenizers,
)
from tformer_deploy.bundle.text.bpe import BYTES, byte_words
from tformer_deploy.bundle.text.wrapped import is_word
from tformer_deploy.model.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID

ENGLISH = [
    "Two young, white males are outside near many bushes.",
    "A little girl climbing into a wooden playhouse.",
    "Several men in hard hats are operating a giant pulley system.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
]
GERMAN = [
    "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.",
    "Ein kleines Mädchen klettert in ein Spielhaus aus Holz.",
    "Mehrere Männer mit Schutzhelmen bedienen ein Antriebsradsystem.",
    "Ein Mann in einem blauen Hemd steht auf einer Leiter und putzt ein Fenster.",
]
BPE_SIZE = 120

word_texts = st.text(st.characters(exclude_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def bpe() -> Tokenizers:
    return train_tokenizers("bpe", ENGLISH, GERMAN, BPE_SIZE, ("en", "de"))


def sentencepiece_of(tokenizers: Tokenizers) -> SentencePiece:
    assert isinstance(tokenizers.source, SentencePiece)
    return tokenizers.source


# Both kinds


def test_reserved_ids() -> None:
    assert (UNK_ID, PAD_ID, BOS_ID, EOS_ID) == (0, 1, 2, 3)
    assert SPECIALS == ("<unk>", "<pad>", "<bos>", "<eos>")


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_ids_end_with_eos_and_target_text_drops_specials(kind: str) -> None:
    tokenizers = train_tokenizers(kind, ENGLISH, GERMAN, BPE_SIZE, (None, None))
    for ids, text in (
        (tokenizers.source_ids(ENGLISH[0]), ENGLISH[0]),
        (tokenizers.target_ids(GERMAN[0]), GERMAN[0]),
    ):
        assert ids.count(EOS_ID) == 1 and ids[-1] == EOS_ID
        assert all(i >= len(SPECIALS) for i in ids[:-1])
        assert tokenizers.target_text([BOS_ID, *ids, PAD_ID, PAD_ID]) == text
    assert tokenizers.source_ids("") == tokenizers.target_ids("") == [EOS_ID]
    assert tokenizers.target_text([BOS_ID, EOS_ID, PAD_ID]) == ""


@pytest.mark.parametrize(("kind", "languages"), [("bpe", ("en", "de")), ("words", (None, None))])
def test_a_joint_tokenizer_is_one_object_and_one_file(
    kind: str, languages: tuple[str | None, str | None], tmp_path: Path
) -> None:
    tokenizers = train_tokenizers(kind, ENGLISH, GERMAN, BPE_SIZE, languages)
    assert tokenizers.source is tokenizers.target
    description = tokenizers.save(tmp_path)
    assert tokenizer_files(description) == [path.name for path in tmp_path.iterdir()]
    loaded = load_tokenizers(tmp_path, description)
    assert loaded.source is loaded.target and loaded.source.size == tokenizers.source.size
    for line in [*ENGLISH, *GERMAN, "never seen: Żółw 123"]:
        assert loaded.source_ids(line) == tokenizers.source_ids(line)
        assert loaded.target_text(loaded.target_ids(line)) == tokenizers.target_text(tokenizers.target_ids(line))


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_a_vocabulary_needs_more_than_the_specials(kind: str) -> None:
    with pytest.raises(ConfigError, match="--vocab-size 4"):
        train_tokenizers(kind, ENGLISH, GERMAN, 4, (None, None))


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_entries_have_names(kind: str) -> None:
    tokenizer = train_tokenizers(kind, ENGLISH, GERMAN, BPE_SIZE, (None, None)).target
    every = list(range(tokenizer.size))
    pieces = tokenizer.pieces(every)
    specials = ("<unk>", "<pad>", "<s>", "</s>") if kind == "bpe" else SPECIALS
    assert tuple(pieces[:4]) == specials and len(set(pieces)) == tokenizer.size
    assert [tokenizer.id_of(piece) for piece in pieces] == every
    assert [tokenizer.id_of(name) for name in ("", "zebra\u2581", "<EOS>", " ")] == [None] * 4
    ids = tokenizer.encode(GERMAN[1])
    joined = (
        " ".join(tokenizer.pieces(ids)) if kind == "words" else "".join(tokenizer.pieces(ids)).replace("\u2581", " ")
    )
    assert joined.strip() == GERMAN[1]


def test_ids_that_the_tokenizer_lacks_have_no_text(bpe: Tokenizers) -> None:
    """A model's vocabulary may be padded."""
    for tokenizers in (bpe, train_tokenizers("words", ENGLISH, GERMAN, BPE_SIZE, (None, None))):
        ids = tokenizers.target.encode(GERMAN[0])
        size = tokenizers.target.size
        assert tokenizers.target_text([size, *ids, size + 7]) == GERMAN[0]


def test_unknown_kind_names_the_valid_ones() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'words'.*bpe, unigram, words"):
        train_tokenizers("word", ENGLISH, GERMAN, 50, (None, None))


# BPE


def test_bpe_has_the_specials_first_and_the_size_asked_for(bpe: Tokenizers) -> None:
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_proto=sentencepiece_of(bpe)._model)
    assert (pieces.unk_id(), pieces.pad_id(), pieces.bos_id(), pieces.eos_id()) == (0, 1, 2, 3)
    assert bpe.source.size == BPE_SIZE
    assert max(i for line in ENGLISH for i in bpe.source.encode(line)) < BPE_SIZE


def test_bpe_round_trip(bpe: Tokenizers) -> None:
    for line in [*ENGLISH, *GERMAN, "Zwei Männer putzen a window."]:
        assert bpe.target.decode(bpe.target.encode(line)) == line


def test_bpe_never_makes_specials_from_text(bpe: Tokenizers) -> None:
    assert not {PAD_ID, BOS_ID, EOS_ID} & set(bpe.source.encode("<pad> <bos> <eos> </s>"))
    assert UNK_ID in bpe.source.encode("漢")


def test_bpe_training_is_repeatable(bpe: Tokenizers) -> None:
    again = train_tokenizers("bpe", ENGLISH, GERMAN, BPE_SIZE, ("en", "de"))
    assert sentencepiece_of(again)._model == sentencepiece_of(bpe)._model


def test_too_large_a_vocabulary_names_the_largest_possible() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 5000 does not fit") as caught:
        SentencePiece.train(ENGLISH, 5000)
    largest = re.search(r"<= (\d+)", str(caught.value))
    assert largest and "\n" not in str(caught.value)
    assert SentencePiece.train(ENGLISH, int(largest[1])).size == int(largest[1])
    with pytest.raises(ConfigError):
        SentencePiece.train(ENGLISH, int(largest[1]) + 1)


def test_too_small_a_vocabulary_for_the_alphabet() -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size 10 .* 10 vs \d+"):
        SentencePiece.train(ENGLISH, 10)


# Words


def test_words_keep_the_most_frequent_and_the_first_of_equals() -> None:
    words = Words.train(["b a c", "a b d", "a e"], None, len(SPECIALS) + 3)
    assert words.size == 7
    assert words.encode("a b c d e zebra") == [4, 5, 6, UNK_ID, UNK_ID, UNK_ID]
    assert words.decode([BOS_ID, 4, 6, UNK_ID, EOS_ID, PAD_ID]) == "a c <unk>"


@settings(max_examples=40)
@given(st.lists(word_texts, max_size=8))
def test_whitespace_words_round_trip(made: list[str]) -> None:
    text = " ".join(made)
    words = Words.train([text], None, 1000)
    ids = words.encode(f"  {text}\t")
    assert words.decode(ids) == text
    assert all(len(SPECIALS) <= i < words.size for i in ids)


@settings(max_examples=20)
@given(st.lists(st.lists(word_texts, max_size=5).map(" ".join), min_size=1, max_size=4))
def test_words_from_a_file_give_the_same_ids(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    folder = tmp_path_factory.mktemp("words")
    saved = train_tokenizers("words", lines, lines, 100, (None, None))
    loaded = load_tokenizers(folder, saved.save(folder))
    assert [loaded.source_ids(line) for line in lines] == [saved.source_ids(line) for line in lines]


def test_words_never_make_specials_from_text() -> None:
    words = Words([*SPECIALS, "a"], None)
    assert words.encode("a <pad> <bos> <eos> <unk>") == [4, UNK_ID, UNK_ID, UNK_ID, UNK_ID]


def test_spacy_rules_keep_punctuation_apart(tmp_path: Path) -> None:
    pytest.importorskip("spacy", reason="the spaCy rules need the 'words' extra")
    tokenizers = train_tokenizers("words", ENGLISH, GERMAN, 500, ("en", "de"))
    assert tokenizers.source is not tokenizers.target
    english = tokenizers.source.decode(tokenizers.source.encode(ENGLISH[0]))
    german = tokenizers.target.decode(tokenizers.target.encode(GERMAN[0]))
    assert english == "Two young , white males are outside near many bushes ."
    assert german == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche ."
    assert tokenizers.source_ids("A zebra .") == [
        tokenizers.source.encode("A")[0],
        UNK_ID,
        tokenizers.source.encode(".")[0],
        EOS_ID,
    ]
    description = tokenizers.save(tmp_path)
    assert tokenizer_files(description) == ["source.words", "target.words"]
    loaded = load_tokenizers(tmp_path, description)
    for line in (*ENGLISH, "  Isn't it?  "):
        assert loaded.source_ids(line) == tokenizers.source_ids(line)
    for line in GERMAN:
        assert loaded.target_ids(line) == tokenizers.target_ids(line)


def test_unknown_language_is_a_config_error() -> None:
    pytest.importorskip("spacy", reason="the spaCy rules need the 'words' extra")
    with pytest.raises(ConfigError, match="'qq'"):
        Words.train(ENGLISH, "qq", 100)


# Damaged files


@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "half"])
def test_damaged_sentencepiece_model(damage: bytes | None, bpe: Tokenizers, tmp_path: Path) -> None:
    description = bpe.save(tmp_path)
    file = tmp_path / "tokenizer.model"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with pytest.raises(ArtifactError, match=r"tokenizer\.model is damaged"):
        load_tokenizers(tmp_path, description)


@pytest.mark.parametrize("damage", [b"", b"a\nb\n", b"<unk>\n<pad>\n<bos>\n<eos>\n\xff\n"])
def test_damaged_word_list(damage: bytes, tmp_path: Path) -> None:
    description = train_tokenizers("words", ["a b"], ["a b"], 10, (None, None)).save(tmp_path)
    (tmp_path / "tokenizer.words").write_bytes(damage)
    with pytest.raises(ArtifactError, match=r"tokenizer\.words is damaged"):
        load_tokenizers(tmp_path, description)


def test_missing_file_and_unknown_kind(bpe: Tokenizers, tmp_path: Path) -> None:
    description = bpe.save(tmp_path)
    newer = {**description["source"], "kind": "characters"}
    with pytest.raises(ArtifactError, match="unknown tokenizer kind 'characters'"):
        load_tokenizers(tmp_path, {"source": newer, "target": newer})
    (tmp_path / "list.json").write_text('{"entries": ["<s>"]}')
    for odd in ({"inner": "@@"}, {"regex": 5}):
        other = {**description["source"], "kind": "words", "file": "list.json", **odd}
        with pytest.raises(ArtifactError, match=r"list\.json is damaged"):
            load_tokenizers(tmp_path, {"source": other, "target": other})
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(ArtifactError, match=r"incomplete: tokenizer\.model is missing"):
        load_tokenizers(tmp_path, description)


# Kinds that imports make


def byte_bpe(space: bool = False) -> ByteBpe:
    entries = ["<s>", "<pad>", "</s>", "<unk>", *sorted(set(BYTES.values())), "\u0120t", "he", "\u0120the"]
    return ByteBpe(entries, ["\u0120 t", "h e", "\u0120t he"], Specials(1, 0, 2, 3, (0, 3)), space=space)


def word_bpe(**how: str) -> WordBpe:
    letters = ["a", "b", "c", "ab", "abc"]
    inner, final = how.get("inner", "@@"), how.get("final", "")
    pieces = [*(letter + inner for letter in letters), *(letter + final for letter in letters)]
    entries = list(dict.fromkeys(["<unk>", "<pad>", "<s>", "</s>", *pieces]))
    return WordBpe(entries, ["a b", "ab c</w>", "ab c"], Specials(), **how)


OTHERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_bpe,
    "bytes behind a space": lambda: byte_bpe(space=True),
    "subword-nmt": word_bpe,
    "ends of words": lambda: word_bpe(inner="", final="</w>"),
    "expression": lambda: Words([*SPECIALS, "ab", "c", "d"], None, regex=r"ab|.", lower=True),
    "bytes beside added tokens": lambda: Wrapped(byte_bpe(), Around((AddedToken(261, lstrip=True), AddedToken(262)))),
    "ends of words, added as in Python": lambda: Wrapped(
        word_bpe(inner="", final="</w>"), Around((AddedToken(8, single_word=True),), python=True, clean_up=True)
    ),
    "a word with a line's end": lambda: Words([*SPECIALS, "a", "\n"], None),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_kinds_are_read_as_they_were_written(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    made = make()
    tokenizers = Tokenizers(made, made, prefix=(5,), suffix=(6, 2))
    description = json.loads(json.dumps(tokenizers.save(tmp_path)))
    loaded = load_tokenizers(tmp_path, description)
    assert loaded.source is loaded.target and loaded.source.specials == made.specials
    for text in ("abc ab", "the  they\tABC", "", "</s> a", "日本 ab\u00a0c"):
        assert loaded.source_ids(text) == [5, *made.encode(text), 6, 2]
        assert loaded.target_text(loaded.target_ids(text)) == made.decode(made.encode(text))
        assert not {*made.encode(text)} & ({*made.specials.ids} - {made.specials.unk})


@given(st.text(max_size=30))
def test_bytes_give_every_text_back(text: str) -> None:
    tokenizer = byte_bpe()
    assert tokenizer.decode(tokenizer.encode(text)) == text.encode("utf-8", "replace").decode()
    assert "".join(byte_words(text)) == text


def test_long_words_are_not_kept() -> None:
    for tokenizer in (byte_bpe(), word_bpe()):
        for length in (3, 3, 1000, 1000):
            tokenizer.encode("a" * length)
        assert tokenizer._kept.cache_info().currsize == tokenizer._kept.cache_info().hits == 1


def test_pairs_are_merged_in_the_order_of_their_rules() -> None:
    tokenizer = word_bpe()
    found = {word: tokenizer.pieces(tokenizer.encode(word)) for word in ("abc", "abcc", "ca", "abx")}
    assert found == {"abc": ["abc"], "abcc": ["abc@@", "c"], "ca": ["c@@", "a"], "abx": ["ab@@", "<unk>"]}
    assert tokenizer.decode(tokenizer.encode("abcc ca")) == "abcc ca"
    with pytest.raises(ArtifactError, match="the merge rule 'a' is not two symbols"):
        WordBpe(list("abcde"), ["a"], Specials())


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "ab", "ba", "aa"]), st.sampled_from("ab")), min_size=1, unique=True),
    st.text("ab", min_size=1, max_size=30),
)
def test_each_rule_is_applied_wherever_it_can_be_before_the_next(rules: list[tuple[str, str]], word: str) -> None:
    plain = [*word]
    while pairs := set(pairwise(plain)) & set(rules):
        best, i = min(pairs, key=rules.index), 0
        while i < len(plain) - 1:
            if (plain[i], plain[i + 1]) == best:
                plain[i : i + 2] = ["".join(best)]
            i += 1
    merges = [" ".join(rule) for rule in rules]
    pieces = [*(f"{symbol}@@" for symbol in plain), "."]  # no rule merges the end of a word
    tokenizer = WordBpe([*"0123", *dict.fromkeys(pieces)], merges, Specials())
    assert tokenizer.pieces(tokenizer.encode(f"{word}.")) == pieces


def test_words_by_an_expression() -> None:
    words = Words([*SPECIALS, "[C@H]", "Cl", "C", "%12"], None, regex=r"\[[^\]]*\]|%\d\d|Br|Cl|.")
    assert words.pieces(words.encode("C[C@H]Cl%12Br")) == ["C", "[C@H]", "Cl", "%12", "<unk>"]
    assert words.decode(words.encode("C[C@H]Cl%12")) == "C[C@H]Cl%12"


def test_a_list_of_pieces_gives_its_own_ids(bpe: Tokenizers, tmp_path: Path) -> None:
    """Also for a piece that the model splits into others, or does not know."""
    model = sentencepiece_of(bpe)._model
    entries = ["</s>", "<unk>", "<pad>", *reversed(bpe.source.pieces(range(4, bpe.source.size)))]
    listed = PieceList(model, entries, Specials(2, -1, 0, 1))
    tokenizers = Tokenizers(listed, listed)
    loaded = load_tokenizers(tmp_path, tokenizers.save(tmp_path))
    assert tokenizer_files(tokenizers.save(tmp_path)) == ["tokenizer.json", "tokenizer.model"]
    for line in ENGLISH:
        assert loaded.source.pieces(loaded.source.encode(line)) == bpe.source.pieces(bpe.source.encode(line))
        assert loaded.target_text(loaded.target_ids(line)) == line
    with pytest.raises(ArtifactError, match="a vocabulary of 2 entries has no special token 2"):
        PieceList(model, entries[:2], Specials(2, -1, 0, 1))


def test_long_lines_are_learned_from() -> None:
    """The library leaves out lines of more than 4,192 bytes by default."""
    lines = ["abc def ghi", "def abc"] * 10
    tokenizers = train_tokenizers("bpe", [*lines, "ζ" + "abc " * 1100], lines, 26, ("en", "de"))
    assert UNK_ID not in tokenizers.source.encode("ζ")


# Around a tokenizer


def spoken(*tokens: AddedToken, **how: bool) -> Wrapped:
    words = ["a", "b", "x", "<N>", "New York", ".", ",", "'", "n't", "'s", "do"]
    return Wrapped(Words([*SPECIALS, *words], None), Around(tokens, **how))


def test_added_tokens_take_white_space_and_stand_alone() -> None:
    """By their flags, as the library `tokenizers` does it, and as transformers does in Python."""
    for flags, text, by_library, by_python in (
        ({}, "a<N>b", ["a", "<N>", "b"], ["a", "<N>", "b"]),
        ({"single_word": True}, "a <N>. <N>b", ["a", "<N>", ".", "<unk>"], ["a", "<unk>", "<unk>"]),
        ({"single_word": True}, "<N>", ["<N>"], ["<N>"]),
    ):
        token = AddedToken(7, **flags)
        for python, expected in ((False, by_library), (True, by_python)):
            tokenizer = spoken(token, python=python)
            assert tokenizer.pieces(tokenizer.encode(text)) == expected, (flags, python)
    bytewise = ByteBpe(["<s>", "<pad>", "</s>", "<unk>", *sorted(set(BYTES.values())), "<N>"], [], Specials(1, 0, 2, 3))
    for flags, expected in (
        ({}, 5),
        ({"lstrip": True}, 4),
        ({"rstrip": True}, 2),
        ({"lstrip": True, "rstrip": True}, 1),
    ):
        tokenizer = Wrapped(bytewise, Around((AddedToken(bytewise.size - 1, **flags),)))
        assert len(tokenizer.encode(" <N>\u3000")) == expected


def test_what_an_added_token_must_be() -> None:
    for i in (0, 99, -1):
        with pytest.raises(ArtifactError, match=f"the added token {i} is not an entry that text can give"):
            spoken(AddedToken(i))


def test_an_entry_that_only_text_gives_as_it_stands() -> None:
    """Not by the tokenizer's own rules, if it is no piece of its own."""
    twice = Words([*SPECIALS, "x", "x"], None)
    assert Wrapped(twice, Around((AddedToken(4), AddedToken(5)))).encode("xx") == [4, 4]
    assert spoken(AddedToken(6, single_word=True), python=True).encode("x x.") == [6, 0]
    assert Wrapped(WORDS_OF_X, Around((AddedToken(4, single_word=True),))).encode("xy") == [0, 0]
    assert Wrapped(WORDS_OF_X, Around((AddedToken(4, single_word=True, piece=True),))).encode("xy") == [4, 0]


WORDS_OF_X = Words([*SPECIALS, "x"], None, regex=".")


@settings(max_examples=300)
@given(st.lists(st.integers(4, 14), max_size=12))
def test_a_stream_shows_only_what_stays(ids: list[int]) -> None:
    target = spoken(clean_up=True)
    tokenizers = Tokenizers(target, target)
    whole = tokenizers.target_text(ids)
    shown = [tokenizers.settled_text(ids[:i]) for i in range(len(ids) + 1)]
    assert all(whole.startswith(text) for text in shown)
    assert "do n't" not in whole and " ," not in whole and " ." not in whole


@settings(max_examples=200)
@given(st.lists(st.sampled_from([*"aé中🙂 ".encode(), 0xFF]), max_size=12))
def test_a_character_is_settled_once_it_is_whole(content: list[int]) -> None:
    tokenizer = ByteBpe(["<s>", "<pad>", "</s>", "<unk>", *(BYTES[i] for i in range(256))], [], Specials(1, 0, 2, 3))
    tokenizers, ids = Tokenizers(tokenizer, tokenizer), [4 + byte for byte in content]
    whole = tokenizers.target_text(ids)
    assert all(whole.startswith(tokenizers.settled_text(ids[:i])) for i in range(len(ids) + 1))


def test_words_are_those_of_the_library() -> None:
    """`single_word` looks at the characters beside a token."""
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, "x"))
    theirs.add_tokens([tokenizers.AddedToken("<N>", single_word=True)])
    known = [chr(i) for i in (*range(1, 0x3000), *range(0x1F100, 0x1F1A0)) if chr(i) not in "<N>"]
    known = [c for c in known if unicodedata.category(c) != "Cn"]
    for c, found in zip(known, theirs.encode_batch([f"{c}<N>" for c in known]), strict=True):
        assert is_word(c) == (1 not in found.ids), hex(ord(c))
