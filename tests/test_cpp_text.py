"""The tokenizers of libtformer against Python's: real lines, noise of all Unicode, names of special tokens."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy.base.errors import ConfigError
from tformer_deploy.base.headers import POINTER
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
)
from tformer_deploy.bundle.text.bpe import BYTES, byte_words
from tformer_deploy.bundle.text.words import compiled

from .cpp_library import ROOT
from .cpp_programs import Talk, program

DEMO = ROOT / ".demo"
TABLES = ROOT / "engines" / "src" / "text" / "unicode_tables.inc"
UNICODE = TABLES.read_text(encoding="utf-8").split()[2].rstrip(",")
"""The version that C++ knows."""
LINES = 500
PARTS = [
    *("</s>", "<s>", "<pad>", "<unk>", "<bos>", "<eos>", "<0xE2>", "<0x41>", "\u2581", "@@", "</w>", "##", "\ufffd"),
    *("'s", "'ll", "'re", "don't", "I'VE", "3.14", "½", "Ⅷ", "٣", "日本語", "Straße", "ΟΔΟΣ", "ΣΑΣ.Σ", "İI", "ǅ"),
    *(" ", "  ", "\t", "\r", "\n", "\x0b", "\x1c", "\x1f", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\u200b"),
    *("\x00", "\x7f", "e\u0301", "\u0345", "🏳️\u200d🌈", "\U0010ffff", "[C@H]", "Cl", "%12", "Br", "CCO", "ab", "abc"),
]


def real_lines() -> list[str]:
    """Lines of this project's own pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [line for page in pages for line in page.read_text(encoding="utf-8").split("\n") if line]


@cache
def known_characters() -> list[str]:
    """Those that both languages know: where their Unicode differs, those of an old one."""
    database = unicodedata if unicodedata.unidata_version == UNICODE else unicodedata.ucd_3_2_0
    return [c for c in map(chr, range(sys.maxunicode + 1)) if database.category(c) not in ("Cs", "Cn", "Co")]


def noise(seed: int, count: int = LINES) -> list[str]:
    """Random characters and strange parts, side by side."""
    rng, every = np.random.default_rng(seed), known_characters()
    few = "aAbBcCsStTlL dDvVeErRmM.,!?09"

    def part() -> str:
        kind = rng.integers(4)
        if kind == 0:
            return str(rng.choice(PARTS))
        letters = few if kind == 1 else every[:0x500] if kind == 2 else every
        return "".join(letters[i] for i in rng.integers(len(letters), size=rng.integers(1, 8)))

    return ["".join(part() for _ in range(rng.integers(1, 12))) for _ in range(count)]


@cache
def sentencepiece_model(kind: str, byte_fallback: bool = False) -> bytes:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.Train(
        sentence_iterator=iter(real_lines()),
        model_writer=model,
        model_type=kind,
        vocab_size=900,
        byte_fallback=byte_fallback,
        character_coverage=0.9995,
        unk_id=0,
        pad_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
    )
    return model.getvalue()


def learned(words: list[tuple[str, ...]], count: int) -> list[str]:
    """The most frequent pairs, one behind the other; of equal ones the first."""
    rules = []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = pairs.most_common(1)[0]
        rules.append(f"{left} {right}")
        merged = []
        for word in words:
            symbols: list[str] = []
            for symbol in word:
                if symbols and (symbols[-1], symbol) == (left, right):
                    symbols[-1] += symbol
                else:
                    symbols.append(symbol)
            merged.append(tuple(symbols))
        words = merged
    return rules


def byte_bpe(**how: Any) -> ByteBpe:
    words = [tuple(BYTES[b] for b in word.encode()) for line in real_lines()[:150] for word in byte_words(line)]
    rules = learned(words, 150)
    entries = ["<s>", "<pad>", "</s>", "<unk>", *sorted(set(BYTES.values())), *(r.replace(" ", "") for r in rules)]
    return ByteBpe(entries, rules, Specials(1, 0, 2, 3, (0, 3)), **how)


def word_bpe(inner: str, final: str) -> WordBpe:
    words = [(*word[:-1], f"{word[-1]}</w>") for line in real_lines()[:150] for word in line.split()]
    rules = learned(words, 150)
    symbols = dict.fromkeys(s for word in words for s in (*word, *(c.removesuffix("</w>") for c in word)))
    pieces = [s for rule in rules for s in (rule.replace(" ", ""),)] + list(symbols)
    made = [s.removesuffix("</w>") + final if s.endswith("</w>") else s + inner for s in pieces]
    return WordBpe(list(dict.fromkeys([*SPECIALS, *made])), rules, Specials(), inner=inner, final=final)


def pieces() -> PieceList:
    """Ids in another order than the model's, bytes as pieces, and some pieces that are not in the list."""
    model = sentencepiece_model("unigram", byte_fallback=True)
    known = SentencePiece(model).pieces(range(4, 900))
    entries = ["</s>", "<unk>", "<pad>", *(piece for i, piece in enumerate(reversed(known)) if i % 10)]
    return PieceList(model, entries, Specials(2, -1, 0, 1))


def words(**how: Any) -> Words:
    return Words(
        [*SPECIALS, *dict.fromkeys(w for line in real_lines() for w in line.lower().split()), "ab"], None, **how
    )


def by_expression(regex: str, **how: Any) -> Words:
    made = [*SPECIALS, "[C@H]", "[]", "%12", "Br", "Cl", *map(chr, range(33, 127)), "ß", "ab", "aa", " ", "ς"]
    return Words(made, None, regex=regex, **how)


def wrapped(make: Any, model: bytes = b"", **how: Any) -> Any:
    """A tokenizer with entries of its own that are added tokens as well, of every flag."""
    inner: Any = make()
    entries = inner.pieces(range(inner.size))
    given = [i for i in range(inner.size) if i not in inner.specials.ids and len(entries[i].strip("\u2581@\u0120")) > 1]
    flags = [dict.fromkeys(names, True) for n in range(3) for names in combinations(FLAGS, n)]
    tokens = tuple(AddedToken(given[3 * i], **each, piece=i % 2 == 0) for i, each in enumerate(flags))
    return Wrapped(inner, Around(tokens, **how), model)


def wrapped_pieces(**how: Any) -> Any:
    return wrapped(pieces, sentencepiece_model("unigram", byte_fallback=True), **how)


KINDS: dict[str, Any] = {
    "pieces, added as in tokenizers": lambda: wrapped_pieces(normalize=True),
    "pieces, added, with edges": lambda: wrapped_pieces(normalize=True, edges=True, clean_up=True),
    "pieces, added as in Python": lambda: wrapped_pieces(python=True, clean_up=True),
    "byte-bpe, added": lambda: wrapped(lambda: byte_bpe(space=True)),
    "words, added twice": lambda: Wrapped(
        Words([*SPECIALS, "ab", "c", "ab"], None),
        Around((AddedToken(6, normalized=True), AddedToken(4), AddedToken(5))),
    ),
    "bpe, added": lambda: wrapped(lambda: word_bpe("", "</w>"), python=True),
    "sentencepiece, added": lambda: wrapped(lambda: SentencePiece(sentencepiece_model("bpe"))),
    "sentencepiece bpe": lambda: SentencePiece(sentencepiece_model("bpe")),
    "sentencepiece unigram": lambda: SentencePiece(sentencepiece_model("unigram")),
    "sentencepiece bytes": lambda: SentencePiece(sentencepiece_model("bpe", byte_fallback=True)),
    "pieces": pieces,
    "byte-bpe": byte_bpe,
    "byte-bpe behind a space": lambda: byte_bpe(space=True),
    "bpe": lambda: word_bpe("@@", ""),
    "bpe with ends": lambda: word_bpe("", "</w>"),
    "words": words,
    "words in lower case": lambda: words(lower=True),
    "words with a line's end": lambda: Words([*SPECIALS, "a", "\n", "a", "ab", "</s>"], None),
    "expression": lambda: by_expression(r"\[[^\]]*\]|%\d\d|Br|Cl|."),
    "expression in lower case": lambda: by_expression(r"\w+|[^\w\s]", lower=True),
}
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
EXPRESSIONS = [
    r".",
    r"\S+",
    r"[^ ]{1,2}?",
    r"[]a]+|[^]a]",
    r"a{,2}b|[\w{,3}]",
    r"(?:ab|a)(?=b|c)|(?!x)\w",
    r"^.|.$|\d+",
    r"(?=a)|b",
    r"[A-Z][a-z]*|[\-\]\[\\^]|\(|\)",
    r"(?:[ab]*c)+|\D",
    r"a*?b|x{2}|x{3,}|{|}",
    r"[^\w\s]|[\d.]+|\W",
    r"[a[:alpha:]]",
    r"[^[=.a.=]+|\[|]",
]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tokenizers, Talk]]:
    path = program("tokenize")
    made: Tokenizer = KINDS[request.param]()
    folder = tmp_path_factory.mktemp("text")
    with opened(path, Tokenizers(made, made, prefix=(5,), suffix=(6, 2)), folder) as talk:
        yield Tokenizers(made, made, prefix=(5,), suffix=(6, 2)), talk


def opened(path: Path, tokenizers: Tokenizers, folder: Path) -> Talk:
    description = folder / "description.json"
    description.write_text(json.dumps(tokenizers.save(folder)), encoding="utf-8")
    return Talk(path, description, folder)


def test_real_lines_and_noise(both: tuple[Tokenizers, Talk]) -> None:
    tokenizers, talk = both
    molecules = (ROOT / "tests" / "molecules.txt").read_text(encoding="utf-8").split()
    for line in [*real_lines()[:LINES], *molecules, *noise(1), "", " "]:
        assert talk.ask(line) == tokenizers.source_ids(line), repr(line)


def test_added_tokens_beside_everything(both: tuple[Tokenizers, Talk]) -> None:
    """Entries and white space, one behind the other."""
    tokenizers, talk = both
    rng, tokenizer = Random(7), tokenizers.source
    entries = tokenizer.pieces(range(tokenizer.size))
    if isinstance(tokenizer, Wrapped):
        added = [tokenizer.pieces([token.id])[0] for token in tokenizer._around.tokens]
        entries = [*entries[:40], *added * 8, *(part.upper() for part in added)]
    parts = [*PARTS, "a", " ", "  ", ".", "_", "½", "Ⓐ", "n't", " ' ", *entries]
    for _ in range(LINES):
        line = "".join(rng.choices(parts, k=rng.randint(1, 8)))
        assert talk.ask(line) == tokenizers.source_ids(line), repr(line)


def test_ids_back_to_text(both: tuple[Tokenizers, Talk]) -> None:
    tokenizers, talk = both
    rng, size = np.random.default_rng(2), tokenizers.target.size
    real = [tokenizers.target_ids(line) for line in [*real_lines()[:LINES], *noise(3, 100)]]
    drawn = [rng.integers(0, size + 3, rng.integers(1, 30)).tolist() for _ in range(LINES)]
    for ids in [*real, *drawn, [], list(range(size))]:
        assert talk.ask(ids) == tokenizers.target_text(ids), ids
        assert talk.ask({"settled": ids}) == tokenizers.settled_text(ids), ids


def test_entries_by_their_names(both: tuple[Tokenizers, Talk]) -> None:
    """Every one, special ones and those that there are twice too; and what is no entry."""
    tokenizer, talk = both[0].target, both[1]
    for entry in (*dict.fromkeys(tokenizer.pieces(range(tokenizer.size))), *PARTS, "", "no such entry"):
        found = tokenizer.id_of(entry)
        assert talk.ask({"entry": entry}) == (-1 if found is None else found), repr(entry)


@pytest.mark.parametrize("regex", EXPRESSIONS)
def test_expressions(regex: str, tmp_path: Path) -> None:
    tokenizer = by_expression(regex)
    with opened(program("tokenize"), Tokenizers(tokenizer, tokenizer), tmp_path) as talk:
        lines = [*real_lines()[:100], *noise(4, 200), "aab c{,3}xxx]a[", "ab\n", "\n", "aaab\nb"]
        for line in lines:
            assert talk.ask(line) == [*tokenizer.encode(line), 3], repr(line)


def test_rules_in_any_order(tmp_path: Path) -> None:
    """A pair that a rule makes may come before that rule in the list; long words."""
    rng = np.random.default_rng(5)
    for _ in range(30):
        symbols = ["a", "b", "c", "a</w>", "b</w>"]
        for _ in range(12):
            left, right = rng.choice([s for s in symbols if not s.endswith("</w>")]), rng.choice(symbols)
            symbols.append(f"{left}{right}")
        pairs = [f"{s[:i]} {s[i:]}" for s in symbols for i in range(1, len(s.removesuffix("</w>")))]
        rules = rng.permutation(pairs).tolist()
        entries = [*SPECIALS, *dict.fromkeys(s.removesuffix("</w>") + end for s in symbols for end in ("", "@@"))]
        tokenizer = WordBpe(entries, rules, Specials())
        with opened(program("tokenize"), Tokenizers(tokenizer, tokenizer), tmp_path) as talk:
            for size in (1, 2, 3, 5, 8, 20, 300):
                for _ in range(10):
                    word = "".join(rng.choice(["a", "b", "c"], size, p=[0.5, 0.4, 0.1]))
                    assert talk.ask(word) == [*tokenizer.encode(word), 3], (rules, word)


@pytest.mark.parametrize("name", ["run", "bundle"])
def test_tokenizers_of_the_demo(name: str, tmp_path: Path) -> None:
    header = next((f for f in (DEMO / name / "manifest.json", DEMO / name / "checkpoint.json") if f.is_file()), None)
    if header is None:
        pytest.skip(f"{DEMO / name} is missing: make demo")
    description = json.loads(header.read_text(encoding="utf-8"))["tokenizer"]
    tokenizers = load_tokenizers(DEMO / name, description)
    file = tmp_path / "description.json"
    file.write_text(json.dumps(description), encoding="utf-8")
    with Talk(program("tokenize"), file, DEMO / name) as talk:
        for line in [*real_lines()[:LINES], *(ROOT / "tests" / "molecules.txt").read_text().split(), *noise(6)]:
            ids = tokenizers.source_ids(line)
            assert talk.ask(line) == ids
            assert talk.ask(ids) == tokenizers.target_text(ids)


def test_rules_of_spacy_are_refused_by_name(tmp_path: Path) -> None:
    """Ids still become text."""
    description = {"kind": "words", "file": "w.words", "language": "de", "specials": Specials().to_json()}
    (tmp_path / "w.words").write_text("<unk>\n<pad>\n<bos>\n<eos>\nein\nHaus\n", encoding="utf-8")
    (tmp_path / "d.json").write_text(json.dumps({"source": description, "target": description}))
    with Talk(program("tokenize"), tmp_path / "d.json", tmp_path) as talk:
        said = talk.ask("ein Haus")["error"]
        assert said.startswith("this bundle's text is split by spaCy's rules for 'de', and C++ has no spaCy rules: ")
        assert talk.ask([4, 5, 3]) == "ein Haus"


# Characters


@pytest.fixture(scope="module")
def characters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    made = Words([*SPECIALS, "a"], None)
    with opened(program("tokenize"), Tokenizers(made, made), tmp_path_factory.mktemp("text")) as talk:
        yield talk


def test_the_table_of_characters_is_this_unicode() -> None:
    if unicodedata.unidata_version != UNICODE:
        pytest.skip(f"the tables are Unicode {UNICODE}, this Python has {unicodedata.unidata_version}")
    script = TABLES.parent / "make_tables.py"
    made = subprocess.run([sys.executable, script], capture_output=True, check=True, text=True)
    assert made.stdout == TABLES.read_text(encoding="utf-8"), f"make it again: python3 {script}"


def test_white_space_and_lower_case_of_every_character(characters: Talk) -> None:
    known = known_characters()
    for start in range(0, len(known), 500):
        part = known[start : start + 500]
        assert characters.ask({"lower": "".join(part)}) == "".join(part).lower()
        text = "x".join(part)
        assert characters.ask({"split": text}) == text.split()
    spaces = [c for c in known if c.isspace()]
    for c in [*spaces, "\u200b", "\ufeff", "\x00"]:
        text = f"{c}{c} a{c}b {c}"
        assert characters.ask({"strip": text}) == text.strip()


@settings(max_examples=300)
@given(st.text(st.sampled_from("aB\u03a3\u03c3'.\u0345\u00adİ1 ʰΑ\u0301"), max_size=12))
def test_final_sigmas(characters: Talk, text: str) -> None:
    assert characters.ask({"lower": text}) == text.lower()


@settings(max_examples=500)
@given(
    st.lists(st.sampled_from([*b"a\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc2\xdf\xe0\xed\xef\xf0\xf4\xf5\xff"]), max_size=9)
)
def test_bytes_that_are_no_text(characters: Talk, numbers: list[int]) -> None:
    assert characters.ask({"replaced": numbers}) == bytes(numbers).decode("utf-8", "replace")
    try:
        bytes(numbers).decode("utf-8")
        reason = ""
    except UnicodeDecodeError as error:
        reason = error.reason
    assert characters.ask({"problem": numbers}) == reason


# What is refused


def damaged(folder: Path, description: dict[str, Any]) -> str:
    (folder / "d.json").write_text(json.dumps({"source": description, "target": description}))
    run = subprocess.run(
        [program("tokenize"), folder / "d.json", folder], capture_output=True, text=True, input="", check=False
    )
    assert run.returncode == 1 and run.stderr.count("\n") == 1, run
    return run.stderr


SPECIAL = Specials().to_json()
DAMAGED: list[tuple[dict[str, Any], dict[str, bytes], str]] = [
    ({"kind": "words", "file": "w", "language": None}, {"w": b"a\nb\n"}, "a word list must begin with <unk>"),
    ({"kind": "words", "file": "w", "language": None}, {"w": b""}, "a word list must begin with <unk>"),
    ({"kind": "words", "file": "w", "specials": SPECIAL}, {"w": b"a\nb\n"}, "of 2 entries has no special token"),
    ({"kind": "words", "file": "w", "specials": SPECIAL}, {"w": b"a\n\xff\n"}, "not UTF-8"),
    ({"kind": "words", "file": "w", "specials": SPECIAL, "regex": "["}, {"w": b"a\nb\nc\nd\ne\n"}, "expression '['"),
    *(
        ({"kind": "words", "file": "w", "specials": SPECIAL, "regex": regex}, {"w": b"a\nb\nc\nd\n"}, message)
        for regex, message in (
            (r"\C", r"'\C' is not the same in every language"),
            (r"[\p{L}]", r"'\p' is not the same in every language"),
            (r"\é", r"'\é' is not the same in every language"),
            (r"\+++", r"'++' is not the same in every language"),
            (r"(?<=a)b", "'(?' is not the same in every language"),
            (r"(*UCP)a", "'(*' is not the same in every language"),
            (r"(a)|b", "write groups as (?:...)"),
            (r"a*", "matches nothing at all"),
        )
    ),
    ({"kind": "words", "file": "w.json"}, {"w.json": b"{}"}, "no list of texts called 'entries'"),
    ({"kind": "words", "file": "w.json"}, {"w.json": b"{"}, "damaged"),
    ({"kind": "sentencepiece", "file": "m"}, {"m": b""}, "the sentencepiece model is damaged: it is empty"),
    ({"kind": "sentencepiece", "file": "m"}, {"m": b"garbage"}, "the sentencepiece model is damaged"),
    ({"kind": "pieces", "file": "m", "entries": "e"}, {"m": b"garbage"}, "e is missing"),
    ({"kind": "bpe", "file": "b"}, {"b": b'{"entries": [], "merges": []}'}, "of 0 entries has no special token"),
    ({"kind": "bpe", "file": "b"}, {"b": b'{"entries": ["a","b","c","d"], "merges": ["a"]}'}, "'a' is not two symbols"),
    ({"kind": "byte-bpe", "file": "b"}, {"b": b'{"entries": [1], "merges": []}'}, "no list of texts called 'entries'"),
    (
        {"kind": "transformers", "of": "words", "file": "w", "around": {"tokens": [{"id": 3}]}},
        {"w": b"<unk>\n<pad>\n<bos>\n<eos>\n"},
        "the added token 3 is not an entry that text can give",
    ),
    ({"kind": "transformers", "of": "letters", "file": "b", "around": {}}, {"b": b""}, "unknown tokenizer kind"),
    ({"kind": "transformers", "of": "transformers", "file": "b", "around": {}}, {"b": b""}, "unknown tokenizer kind"),
    ({"kind": "characters", "file": "b"}, {"b": b""}, "unknown tokenizer kind 'characters'"),
    ({"kind": "words", "file": "gone"}, {}, "is incomplete: gone is missing"),
    ({"kind": "words", "file": "../w"}, {}, "lies outside"),
    ({"kind": "words", "file": "w"}, {"w": POINTER + b"v1\noid sha256:00\nsize 9\n"}, "w is a pointer of Git LFS, not"),
]


@pytest.mark.parametrize(("description", "files", "message"), DAMAGED, ids=str)
def test_damaged_tokenizers(description: dict[str, Any], files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "w").write_bytes(b"")
    for name, content in files.items():
        (tmp_path / "in" / name).write_bytes(content)
    if "regex" in description:
        with pytest.raises(ConfigError):
            compiled(description["regex"])
    assert message in damaged(tmp_path / "in", description)
