"""Modules of a user's own: by recomputation, by hooks, by the protocol. What is wrong with one is said in a line."""

from __future__ import annotations

import dataclasses
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tformer_deploy import UserModel
from tformer_deploy.base.errors import ConfigError, LimitError
from tformer_deploy.bundle.manifest import Bundle
from tformer_deploy.bundle.recipe import Recipe, load_recipe
from tformer_deploy.bundle.text import SentencePiece
from tformer_deploy.check.generated import not_scored, reachable
from tformer_deploy.check.observe import CheckOptions
from tformer_deploy.check.reference import load_reference, make_reference
from tformer_deploy.decoding import DecodeOptions, decode
from tformer_deploy.engines.eager import EagerEngine
from tformer_deploy.export.checked import require_exportable
from tformer_deploy.export.trace import Tracer, quiet
from tformer_deploy.model.modules.probe import calling, looks_ahead, wrapped
from tformer_deploy.model.modules.running import open_user_model

from .command import run_here
from .conftest import random_model, small_config
from .plain_decoding import EOS, make_batch
from .test_seq2seq import Parallel, make_parallel
from .user_models import (
    MODELS,
    PAD,
    POSITIONS,
    START,
    VOCAB,
    D,
    Make,
    Tutorial,
    require_own_tokens,
    sources,
    tutorial,
    varied,
)


@pytest.mark.parametrize("name", MODELS)
def test_steps_are_the_modules_own_loop(name: str) -> None:
    user = MODELS[name]()
    with EagerEngine(wrapped(user, name)) as engine:
        require_own_tokens(engine, user)


def test_threads_share_a_module_with_hooks() -> None:
    """Its hooks are of one call at a time, and PyTorch's fast path is as it was afterwards."""
    before, options = torch.backends.mha.get_fastpath_enabled(), DecodeOptions(max_tokens=POSITIONS)
    with EagerEngine(wrapped(tutorial(hooks=True), "here")) as engine, ThreadPoolExecutor(4) as workers:

        def tokens(source: tuple[int, ...]) -> list[int]:
            return decode(engine, make_batch([source]), options)[0][0].ids

        expected = [tokens(source) for source in sources()]
        assert list(workers.map(tokens, sources() * 4)) == expected * 4
    assert torch.backends.mha.get_fastpath_enabled() is before


ERRORS: dict[str, str] = {
    "return 5": ("my_file.py:make returned a int: return a tformer_deploy.UserModel"),
    "return tutorial().module": "returned a Tutorial, which has no config, cross_keys_values, step: return ",
    "return nowhere": "my_file.py, line 5: make() raised NameError: name 'nowhere' is not defined",
    "return tutorial(forward=lambda m, src, mask, tgt: m(src, tgt))": "line 5: forward raised TypeError: ",
    "return tutorial(forward=lambda m, src, mask, tgt: m(src, tgt, ~mask)[:, -1])": (
        "forward returned float32 (3, 30), where logits (B, T, V) is (3, 4, 30)"
    ),
    "return tutorial(forward=lambda m, src, mask, tgt: (m(src, tgt, ~mask), 0))": (
        "forward returned a tuple, not a tensor of logits (B, T, V)"
    ),
    "return tutorial(forward=lambda m, src, mask, tgt: m(src, tgt, ~mask) / 0)": "logits that are not numbers",
    "return tutorial(forward=lambda m, src, mask, tgt: m(src, tgt, ~mask).softmax(-1))": (
        "py:make: forward returned probabilities, which sum to 1, where logits are wanted: leave its softmax out, or"
    ),
    "return tutorial(hooks=True, decode=lambda m, memory, mask, tgt: m.decode(memory, tgt, ~mask).softmax(-1))": (
        "py:make: decode returned probabilities, which sum to 1"
    ),
    "return tutorial(forward=lambda m, src, mask, tgt: m(src, tgt, ~mask & False))": (
        "where longer ones stand beside it: mask its padding with src_mask"
    ),
    "return tutorial(forward=None)": "UserModel(module): give forward, both encode and decode, or encode alone",
    "return tutorial(forward=None, decode=lambda m, memory, mask, tgt: m.decode(memory, tgt, ~mask))": (
        "UserModel(decode=...): give forward, both encode and decode, or encode alone"
    ),
    "return tutorial(forward=None, encode=lambda m, src, mask: m.encode(src, ~mask))": (
        "UserModel(tgt_vocab=...): leave it out beside encode alone, or give decode as well"
    ),
    "return tutorial(hooks=True, encode=lambda m, src, mask: src)": (
        "encode returned int64 (3, 5), where memory (B, S, d) is (3, 5, d)"
    ),
    "return tutorial(eos_id=-1)": "UserModel(eos_id=-1): give the token's id",
    "return tutorial(max_positions=13)": (
        "with max_positions=13, raised IndexError: index out of range in self: is src_vocab, tgt_vocab or max_positions"
    ),
    "return tutorial(src_vocab=31)": "raised IndexError: index out of range in self: is src_vocab, ",
    "return tutorial(eos_id=30)": "model.eos_id=30 is outside the vocabulary of 30",
    "return tutorial(max_positions=0)": "UserModel(max_positions=0): must be a whole number of at least 1",
    "return tutorial(layers='decoder')": "UserModel: give layers and self_attention together",
    "return tutorial(hooks=True, layers='transformer.decoder.layer')": (
        "unknown list of layers 'transformer.decoder.layer': did you mean 'transformer.decoder.layers'?"
    ),
    "return tutorial(hooks=True, self_attention='self_attention')": (
        "unknown module of transformer.decoder.layers.0 'self_attention': did you mean 'self_attn'?"
    ),
    "return tutorial(hooks=True, layers='transformer.encoder.layers')": "leave out layers and self_attention",
    "return tutorial(hooks=True, self_attention='linear1')": "leave out layers and self_attention",
    "return tutorial(source=['a', 'b'])": "a vocabulary of 2 entries has no special token 4",
    "return tutorial(source=[f'x{i}' for i in range(31)])": "model.src_vocab=30 is smaller than the tokenizer's",
    "return tutorial(source='words.txt')": "words.txt: No such file or directory: name the file of a vocabulary",
    "return tutorial(decoding={'beam': 4})": "did you mean 'beams'?",
    "user = tutorial()\n    user.module.half()\n    return user": "embedding.weight is not float32: call .float()",
    "return tutorial(module=torch.jit.script(torch.nn.Linear(3, 3)))": "is of torch.jit, which torch.export does not",
    "return tutorial(forward=lambda m, src, mask, tgt: torch.rand(3, 4, 30))": (
        "py:make: the same ids have other scores the second time, by 0."
    ),
    "return tutorial(hooks=True, encode=lambda m, src, mask: F.dropout(m.encode(src, ~mask)))": (
        "it must not draw random numbers in eval, as F.dropout does without training=self.training"
    ),
    "exit()": "line 5: make() raised SystemExit: 0, which ends Python: what only a script does belongs under if",
    "return tutorial(forward=lambda m, src, mask, tgt: exit(3))": "line 5: forward raised SystemExit: 3, which ends",
    "import nothing_of_this_name": "make() raised ModuleNotFoundError: No module named 'nothing_of_this_name'",
}
"""What `make` does, and what is said."""


@pytest.mark.parametrize("body", ERRORS)
def test_what_is_wrong_is_said_in_a_line(body: str, tmp_path: Path) -> None:
    path = tmp_path / "my_file.py"
    first = "import torch; from torch.nn import functional as F"
    path.write_text(f"{first}\nfrom tests.user_models import tutorial\n\ndef make():\n    {body}\n")
    done = run_here("export", f"{path}:make", "--out", tmp_path / "bundle")
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1 and lines[0] == f"running {path}" and lines[-1].startswith("error: "), done.stderr
    assert ERRORS[body] in lines[-1] and len(lines) == 2
    assert (
        sorted(each.name for each in tmp_path.iterdir())
        == ["__pycache__", "my_file.py"][-len(list(tmp_path.iterdir())) :]
    )


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "torch.seed()\n    torch.nn.init.normal_(user.module.output.weight)",
            "gives other weights each time it runs, 1 of 38 tensors, such as output.weight: load them from a file, or "
            "call torch.manual_seed before the module is made",
        ),
        (
            "words = [*map(str, range(29)), str(torch.seed())]\n    user = tutorial(source=words)",
            "gives another vocabulary each time it runs: load it from a file, or sort it",
        ),
    ],
)
def test_what_is_random_each_time_is_said_before_the_work(body: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "my_file.py"
    path.write_text(
        "import torch\nfrom tests.user_models import tutorial\n\n\n"
        f"def make():\n    user = tutorial()\n    {body}\n    return user\n"
    )
    done = run_here("export", f"{path}:make", "--out", tmp_path / "bundle")
    lines = done.stderr.decode().splitlines()
    assert done.returncode == 1 and lines[-1] == f"error: {path}:make {said}"
    assert not list(tmp_path.glob(".bundle*")) and not (tmp_path / "bundle").exists()


class ConversionError(Exception):
    """As the exporter's own."""

    __module__ = "torch.onnx.errors"


EXPORTER: dict[str, str] = {
    "Could not guard on data-dependent expression": (
        "ValueError: a choice by values, such as `if mask.any():`, which no graph has"
    ),
    "tracing inferred a static shape of 4 for": (
        "ValueError: a size became a constant: no len(x), int(x.shape[0]) or loops over positions"
    ),
    "\x1b[96mno function\x1b[0m for aten.unsqueeze": "ValueError: no function for aten.unsqueeze",
}


@pytest.mark.parametrize("said", EXPORTER)
def test_what_the_exporter_says_is_said_in_its_cause_s_words(said: str) -> None:
    with pytest.raises(ConfigError) as found, calling("my_file.py:make", "torch.export"):
        try:
            raise ValueError(said)
        except ValueError as error:
            raise ConversionError("This is step 3/3. Next steps: submit a PR") from error
    assert str(found.value) == f"my_file.py:make: torch.export raised {EXPORTER[said]}"


def test_autocast_is_refused_by_name() -> None:
    class Rounded(Tutorial):
        def forward(self, *given: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(*given).float()

    with pytest.raises(ConfigError, match="here: the module computes in bfloat16: leave autocast"):
        wrapped(tutorial(module=varied(Rounded())), "here")


def test_a_module_that_ends_python_in_the_middle_of_a_check_is_named() -> None:
    def forward(module: Any, src: Tensor, mask: Tensor, tgt: Tensor) -> Tensor:
        if tgt.shape[1] == 7:
            exit(0)
        return module(src, tgt, ~mask)  # type: ignore[no-any-return]

    model, name = wrapped(tutorial(forward=forward), "here"), f"{__file__}:make"
    ended = pytest.raises(ConfigError, match=r"\.py, line \d+: step raised SystemExit: 0, which ends")
    with ended, EagerEngine(model, module=name) as engine:
        decode(engine, make_batch(sources()), DecodeOptions(max_tokens=POSITIONS, min_tokens=POSITIONS))


@pytest.mark.long
@pytest.mark.parametrize("size", [0, 1e-9])
def test_a_draw_too_small_to_be_seen_is_found_in_the_trace(size: float) -> None:
    """A graph has nothing of a draw that nothing depends on."""

    def forward(module: Any, src: Tensor, mask: Tensor, tgt: Tensor) -> Tensor:
        noise = torch.randn(1)
        return module(src, tgt, ~mask) + size * noise if size else module(src, tgt, ~mask)  # type: ignore[no-any-return]

    tracer = Tracer(wrapped(tutorial(forward=forward), "here"))
    if size:
        line = str(forward.__code__.co_firstlineno + 1)
        with pytest.raises(
            ConfigError, match=rf"test_your_model\.py, line {line}: it draws random numbers, which no two"
        ):
            tracer.graph("decoder_step", load_recipe("fp32"))
    else:
        assert tracer.graph("decoder_step", load_recipe("fp32"))


def test_a_trace_prints_nothing() -> None:
    """Whatever torch logs of it on its way to an exception."""
    logger = logging.getLogger("torch.anything")
    with quiet():
        assert not logger.isEnabledFor(logging.ERROR)
    assert logger.isEnabledFor(logging.ERROR)


def test_a_decoder_that_looks_ahead_cannot_have_caches() -> None:
    def decode(module: Any, memory: Tensor, mask: Tensor, tgt: Tensor) -> Tensor:
        x = module.transformer.decoder(module.embed(tgt), memory, memory_key_padding_mask=~mask)
        return module.output(x)  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match="here: with caches of what enters self_attn, log-probabilities differ by"):
        wrapped(tutorial(hooks=True, decode=decode), "here")
    user = tutorial(hooks=True, decode=decode, layers="", self_attention="")
    model = wrapped(user, "here")
    with EagerEngine(model) as engine:  # as odd as it is, that is what the module computes
        require_own_tokens(engine, user)
    assert looks_ahead(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in MODELS if "hooks" not in name])
def test_a_causal_decoder_does_not_look_ahead(name: str) -> None:
    assert not looks_ahead(wrapped(MODELS[name](), name))  # type: ignore[arg-type]


def test_log_probabilities_stay_as_they_are() -> None:
    """Where the last layer is a log_softmax, as in The Annotated Transformer."""
    user = tutorial(forward=lambda m, src, mask, tgt: m(src, tgt, ~mask).log_softmax(-1))
    with EagerEngine(wrapped(user, "here")) as engine:
        require_own_tokens(engine, tutorial())


def test_a_decoder_without_a_causal_mask_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_file.py").write_text(
        "from tests.user_models import tutorial\n\n\n"
        "def decode(m, memory, mask, tgt):\n"
        "    return m.output(m.transformer.decoder(m.embed(tgt), memory, memory_key_padding_mask=~mask))\n\n\n"
        "def make():\n    return tutorial(hooks=True, decode=decode, layers='', self_attention='')\n\n\n"
        "def causal():\n    return tutorial(hooks=True, layers='', self_attention='')\n"
    )
    said = {}
    for name in ("make", "causal"):
        checkpoint = open_user_model(Path(f"{tmp_path}/my_file.py:{name}"))
        capsys.readouterr()
        require_exportable(checkpoint, {})
        said[name] = capsys.readouterr().err.splitlines()
    assert said["make"][1:] == [
        f"{tmp_path}/my_file.py:make: a token's score changes with the tokens after it; a decoder that was trained so "
        "saw what it had to predict: give it a causal mask, and train it again"
    ]
    assert len(said["causal"]) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere.py:make", "nowhere.py: no such file: check the path"),
        ("my_file.py", "my_file.py: name the function that makes the model, as in"),
        ("my_file.py:", "my_file.py: name the function that makes the model, as in"),
        ("my_file.py:mak", "unknown function of"),
        ("broken.py:make", "broken.py, line 1: the file raised SyntaxError: "),
        ("script.py:make", "script.py, line 2: the file raised SystemExit: 0, which ends Python: "),
    ],
)
def test_a_file_or_function_that_is_not_there(path: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "my_file.py").write_text("def make():\n    pass\n")
    (tmp_path / "broken.py").write_text("def make(:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    done = run_here("export", tmp_path / path, "--out", tmp_path / "bundle")
    assert done.returncode == 1 and said in done.stderr.decode().splitlines()[-1]
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("other", "content", "said"),
    [
        ("my_own", "def broken():\n    return nowhere\n", "error: own.py, line 5: make() raised NameError: "),
        ("their_own", "\ndef broken(:\n", "error: own.py, line 1: the file raised SyntaxError: "),
    ],
)
def test_the_line_is_of_the_file_itself(
    other: str, content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one that it imports, even if that one's name ends like its own."""
    (tmp_path / "own.py").write_text(f"import {other}\n\n\ndef make():\n    return {other}.broken()\n")
    (tmp_path / f"{other}.py").write_text(content)
    monkeypatch.chdir(tmp_path)
    assert said in run_here("export", "own.py:make", "--out", "bundle").stderr.decode()


MODULE = """
import torch
from tests.user_models import Tutorial, tutorial, varied


class Kept(Tutorial):
    def __init__(self, shift, state):
        super().__init__()
        self.register_buffer("shift", shift)
        self.state = state

    def decode(self, memory, tgt, padding):
        return super().decode(memory, tgt, padding) + self.shift.float()

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        pass


def make():
    torch.manual_seed(1)
    return tutorial(module=varied(Kept({shift}, {state})))
"""


def test_weights_of_any_type_and_extra_state_identify_a_module(tmp_path: Path) -> None:
    path, hashes = tmp_path / "my_file.py", set()
    for value, state in (("3.0", "'text'"), ("2.0", "'text'"), ("2.0", "{'a': 3}"), ("2.0", "torch.ones(3)")):
        shift = f"torch.full((30,), {value}, dtype=torch.bfloat16)"
        path.write_text(MODULE.replace("{shift}", shift).replace("{state}", state))
        hashes.add(open_user_model(Path(f"{path}:make")).weights_sha256)
    assert len(hashes) == 3, "what is no tensor is no weight"


def test_sparse_buffers_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "my_file.py").write_text(MODULE.replace("{shift}", "torch.eye(3).to_sparse()").replace("{state}", "0"))
    with pytest.raises(ConfigError, match=r"py:make: shift is sparse_coo, not dense: call .to_dense\(\) on it"):
        open_user_model(Path(f"{tmp_path}/my_file.py:make"))


@pytest.mark.parametrize("recipe", ["int8", "fp32-cpu", "trt", "native-fp32", "fp32-attention"])
def test_what_needs_keys_and_values_is_refused_by_name(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "my_file.py"
    path.write_text("from tests.user_models import tutorial\n\n\ndef make():\n    return tutorial()\n")
    done = run_here("export", f"{path}:make", "--out", tmp_path / "bundle", "--recipe", recipe)
    assert done.returncode == 1 and not (tmp_path / "bundle").exists()
    said = done.stderr.decode().splitlines()[-1]
    assert "of every layer, which" in said and "follows seq2seq.Seq2Seq, see docs/your-model.md" in said


class Quiet(Parallel):
    """Follows the protocol, and notes every layer, but no attention."""

    def step(self, *inputs: Any) -> Tensor:
        hidden = super().step(*inputs)
        if isinstance(inputs[-1], dict):
            inputs[-1].pop("attention", None)
        return hidden


def quiet_model() -> UserModel:
    torch.manual_seed(3)
    return UserModel(Quiet(small_config(output_bias=True)))


@pytest.mark.parametrize("make", [tutorial, quiet_model])
@pytest.mark.parametrize("options", [{"align": True}, {"coverage_penalty": 0.2, "beams": 2}])
def test_attention_that_a_module_does_not_give_is_refused_in_a_line(make: Make, options: dict[str, Any]) -> None:
    batch = make_batch([[5, 6, 7]])
    with EagerEngine(wrapped(make(), "here")) as engine:
        assert not engine.attention and not engine.in_double().attention
        with pytest.raises(LimitError, match="does not return attention"):
            decode(engine, batch, DecodeOptions(max_tokens=3, **options))
        with pytest.raises(LimitError, match="does not return attention"):
            engine.step(batch.src_ids[:, :1], engine.encode(batch.src_ids, batch.src_lengths), attention=True)
        assert decode(engine, batch, DecodeOptions(max_tokens=3))


def test_a_stored_reference_of_a_module_without_attention_is_read(tmp_path: Path) -> None:
    options = CheckOptions(max_tokens=6, beams=2, n_best=2, invariance=0, wide=0, large_tokens=0, positions=6, walks=4)
    about = {"corpus": "a few", "weights_sha256": "0" * 64, "machine": {}, "shortlist": ""}
    with EagerEngine(wrapped(tutorial(), "here")) as eager:
        found = make_reference(eager, [[5, 6, EOS], [7, EOS]], options, about)
    found.save(tmp_path / "eager.npz")
    again = load_reference(tmp_path / "eager.npz")
    assert not again.observed.attention and again.observed.encoder.keys() == {0, 1} == found.observed.encoder.keys()


def test_attention_that_a_module_gives_is_returned(tmp_path: Path) -> None:
    with EagerEngine(wrapped(UserModel(make_parallel(small_config(output_bias=True))), "here")) as engine:
        outputs = decode(engine, make_batch([[5, 6, 7]]), DecodeOptions(max_tokens=3, align=True))
        assert engine.attention and outputs[0][0].alignment
    path = tmp_path / "my_file.py"
    path.write_text("from tests.test_your_model import quiet_model as make\n")
    done = run_here("export", f"{path}:make", "--out", tmp_path / "bundle", "--recipe", "fp32-attention")
    said = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1 and "recipe with attention: step of " in said and "notes no attention in layers" in said


def test_text_by_words_and_by_sentencepiece(tmp_path: Path) -> None:
    words = ["<unk>", "<pad>", "<bos>", "-", "<eos>", *(f"word{i}" for i in range(5, VOCAB))]
    user = tutorial(source="words.txt", target=words, unk_id=0, source_prefix=(START,))
    model = wrapped(user, "here")
    for content in ("\n".join(words), "".join(f"{word}\n" for word in words), "".join(f"{word}\r\n" for word in words)):
        (tmp_path / "words.txt").write_bytes(content.encode())
        found = user.tokenizers(model.config, tmp_path)
        assert found.source_ids("word7 unheard word9") == [START, 7, 0, 9, EOS]
        assert found.target_text([7, 9, 0, PAD]) == "word7 word9 <unk>"
    pieces = SentencePiece.train(["aa ab ba bb"] * 20, 12)
    (tmp_path / "joint.model").write_bytes(pieces._model)
    user = tutorial(source="joint.model", target="joint.model", eos_id=3)
    found = user.tokenizers(wrapped(user, "here").config, tmp_path)
    assert found.source is found.target
    assert found.source_ids("ab ba") == [*pieces.encode("ab ba"), 3]
    assert found.target_text(pieces.encode("ab ba")) == "ab ba"
    generated = dataclasses.replace(user, source=None, target=None)
    assert generated.tokenizers(model.config, tmp_path).source.encode("w7 w0 what") == [7, 0, PAD]


def long_tutorial(positions: int) -> UserModel:
    """With so many positions."""
    user = tutorial(max_positions=positions)
    user.module.positions = nn.Embedding(positions, D)
    return user


def test_as_many_positions_are_scored_as_there_is_time_for() -> None:
    """Where every step runs the whole prefix; few positions, and cached steps, are scored to the last."""
    found = {}
    for seconds in (0, 1000):
        for positions in (200, 600):
            options = CheckOptions(positions=positions, seconds=seconds)
            with EagerEngine(wrapped(long_tutorial(positions), "here")) as engine:
                found[seconds, positions] = reachable(engine, options)
    assert found == {(0, 200): 200, (0, 600): 256, (1000, 200): 200, (1000, 600): 600}
    with EagerEngine(random_model(small_config(max_positions=600))) as engine:
        assert reachable(engine, CheckOptions(positions=600, seconds=0)) == 600


def test_the_report_says_to_which_position_scores_were_compared(tmp_path: Path) -> None:
    config = wrapped(long_tutorial(600), "here").config
    bundle = Bundle(tmp_path, config, Recipe().for_model(config), {}, {}, "")
    (line,) = not_scored(CheckOptions(positions=256), bundle)
    assert line.startswith(
        "scores were compared up to position 256 of 600, as there was no time for more: tformer check"
    )
    assert not not_scored(CheckOptions(positions=600), bundle)
    assert not not_scored(CheckOptions(positions=256), dataclasses.replace(bundle, config=small_config()))
