"""The encoder alone: `tformer encode`, its graph, and the check that compares it with eager PyTorch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, helper

from tformer_deploy.base.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    EngineError,
    LimitError,
    NotNumbers,
    ParityError,
)
from tformer_deploy.bundle.contract import GRAPHS, MEMORY_GRAPH
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.bundle.recipe import TOLERANCES, Recipe, recipe_from_dict
from tformer_deploy.check import Gate, make_corpus
from tformer_deploy.engines import encoder_names, make_encoder
from tformer_deploy.export.checked import export_checked
from tformer_deploy.model.checkpoint import open_checkpoint
from tformer_deploy.translate.encode import EncoderOptions, TextEncoder

from .command import failed_line, printed, run_here
from .conftest import exported_once, random_sources, small_config, write_checkpoint, write_lines
from .mutations import break_graph, change_tensor, producer
from .params import long_but

VARIANTS = ["fp32", "fp32-cpu", "int8", "int8-latency", "int4"]
LINES = ["w5 w6 w7", "", "w8", "  w9 w10 w11 w12 w13  ", "w5 w6 w7"]


@pytest.fixture(scope="module")
def memory_bundle(run: Path) -> Path:
    """The small model with its encoder alone, in every variant. Read only."""
    lines = write_lines(run.parent / "memory-lines.txt")
    return exported_once(run, "memory-bundle", [*VARIANTS, "trt"], lines, memory=True)


def limit(name: str) -> float:
    return TOLERANCES["fp32" if name.startswith("fp32") else name.split("-")[0]].memory


def encode(bundle: Path, lines: list[str], **options: Any) -> list[Any]:
    with TextEncoder(EncoderOptions(bundle, threads=1, **options)) as encoder:
        return [found.vectors for found in encoder.encode(lines)]


def test_options_that_are_none_are_refused_in_one_line(tmp_path: Path) -> None:
    options: dict[str, Any]
    for options, message in (
        ({"bundle": 3}, "bundle=3: must be a folder's path"),
        ({"bundle": tmp_path, "checkpoint": 5}, "checkpoint=5: must be a folder's path"),
        ({"bundle": tmp_path, "backend": None}, "backend=None: must be a str"),
    ):
        with pytest.raises(ConfigError, match=message):
            EncoderOptions(**options)


# The graph


def test_every_graph_but_trts_is_in_the_manifest(memory_bundle: Path) -> None:
    bundle = open_bundle(memory_bundle)
    assert encoder_names(bundle) == ["ort", *(f"ort:{name}" for name in VARIANTS[1:])]
    described = bundle.manifest["graphs"][MEMORY_GRAPH]
    assert described["kind"] == "memory/1"
    assert described["outputs"] == [{"name": "memory", "dtype": "float32", "shape": ["batch", "src_len", 32]}]
    assert tuple(bundle.manifest["variants"]["trt"]["graphs"]) == GRAPHS
    assert bundle.variants["int8"].memory and not bundle.variants["trt"].memory


def test_it_reads_the_encoders_weights(memory_bundle: Path, variants_bundle: Path) -> None:
    """The file of weights has not grown, and the other graphs are what they are without it."""
    for variant in ("", *VARIANTS[1:]):
        with_it, without = memory_bundle / variant, variants_bundle / variant
        assert (with_it / "weights.data").stat().st_size == (without / "weights.data").stat().st_size
        for name in GRAPHS:
            ours, theirs = (
                onnx.load(folder / f"{name}.onnx", load_external_data=False) for folder in (with_it, without)
            )
            assert [(n.op_type, *n.input) for n in ours.graph.node] == [
                (n.op_type, *n.input) for n in theirs.graph.node
            ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_is_eagers(variant: str, memory_bundle: Path) -> None:
    """Beside longer sentences, padded, and alone."""
    bundle = open_bundle(memory_bundle)
    name = "ort" if variant == "fp32" else f"ort:{variant}"
    ids, lengths = random_sources(5, 20)
    with make_encoder("eager", bundle) as eager, make_encoder(name, bundle, threads=1) as engine:
        expected, found = eager.memory(ids, lengths), engine.memory(ids, lengths)
        assert expected.shape == found.shape == (5, 20, 32)
        for row, n in enumerate(lengths.tolist()):
            assert np.abs(expected[row, :n] - found[row, :n]).max() < limit(variant)
            alone = engine.memory(np.ascontiguousarray(ids[row : row + 1, :n]), lengths[row : row + 1])
            assert np.abs(alone[0] - found[row, :n]).max() < limit(variant) / 10
    model = open_checkpoint(bundle.checkpoint).load_model()
    import torch

    with torch.inference_mode():
        own = model.encode(torch.from_numpy(ids), torch.from_numpy(lengths)).numpy()
    assert np.array_equal(own, expected)


@pytest.mark.long
def test_sides_of_other_widths(tmp_path: Path) -> None:
    config = small_config(encoder_d_model=24, encoder_heads=3, share_embeddings="decoder")
    run = write_checkpoint(tmp_path / "run", config)
    export_checked(run, tmp_path / "bundle", ["fp32-cpu"], memory=True)
    (found,) = encode(tmp_path / "bundle", ["w5 w6"])
    assert found.shape == (24,)


# Pooling


@pytest.mark.parametrize("backend", ["ort", "eager"])
def test_pools(backend: str, memory_bundle: Path) -> None:
    memory = encode(memory_bundle, LINES, backend=backend, pool="none")
    assert [len(each) for each in memory] == [4, 0, 2, 6, 4], "the end token counts"
    for pool, how in {"mean": lambda m: m.mean(0), "first": lambda m: m[0], "last": lambda m: m[-1]}.items():
        found = encode(memory_bundle, LINES, backend=backend, pool=pool)
        for vector, own in zip(found, memory, strict=True):
            expected = how(own) if len(own) else np.zeros(32)
            assert vector.dtype == np.float32 and np.abs(vector - expected).max() < 1e-6
    assert np.abs(memory[0] - memory[4]).max() < 1e-5


def test_order_and_batches_change_nothing(memory_bundle: Path) -> None:
    rng = np.random.default_rng(3)
    lines = [" ".join(f"w{n}" for n in rng.integers(4, 60, 1 + i * 7 % 19)) for i in range(40)]
    one = encode(memory_bundle, lines, batch_tokens=1)
    for tokens in (64, 4096):
        several = encode(memory_bundle, lines, batch_tokens=tokens)
        assert np.abs(np.array(one) - np.array(several)).max() < 1e-5


# The command


def test_text_and_json(memory_bundle: Path) -> None:
    stdin = "\n".join(LINES).encode()
    done = run_here("encode", memory_bundle, "--threads", 1, stdin=stdin)
    assert done.returncode == 0 and done.stderr == b""
    rows = printed(done)
    expected = encode(memory_bundle, LINES)
    assert rows[1] == "" and len(rows) == len(LINES)
    for row, vector in zip(rows, expected, strict=True):
        assert np.array_equal(np.array(row.split(), np.float32), vector if row else [])
    found = [json.loads(row) for row in printed(run_here("encode", memory_bundle, "--json", stdin=stdin))]
    assert [each["ids"] for each in found][:3] == [[5, 6, 7, 3], [], [8, 3]]
    assert found[1]["vector"] == [] and np.array_equal(np.array(found[0]["vector"], np.float32), expected[0])
    assert run_here("encode", memory_bundle, stdin=b"").stdout == b""


def test_memory_as_text_and_json(memory_bundle: Path) -> None:
    stdin, expected = "\n".join(LINES).encode(), encode(memory_bundle, LINES, pool="none")
    for row, memory in zip(
        printed(run_here("encode", memory_bundle, "--pool", "none", stdin=stdin)), expected, strict=True
    ):
        found = np.array([token.split() for token in row.split("\t")], np.float32) if row else np.zeros((0, 32))
        assert np.array_equal(found, memory)
    rows = printed(run_here("encode", memory_bundle, "--pool", "none", "--json", stdin=stdin))
    for row, memory in zip(map(json.loads, rows), expected, strict=True):
        assert np.array_equal(np.array(row["memory"], np.float32).reshape(-1, 32), memory)
        assert len(row["ids"]) == len(memory)


def test_files_for_numpy(memory_bundle: Path, tmp_path: Path) -> None:
    stdin = "\n".join(LINES).encode()
    done = run_here("encode", memory_bundle, "--out", tmp_path / "v.npy", "--json", stdin=stdin)
    assert json.loads(done.stdout) == {"out": str(tmp_path / "v.npy"), "lines": 5, "tokens": 16, "width": 32}
    assert done.stderr == b"1 empty lines have zeros\n"
    found = np.load(tmp_path / "v.npy")
    assert found.shape == (5, 32) and found.dtype == np.float32 and np.array_equal(found, encode(memory_bundle, LINES))
    assert run_here("encode", memory_bundle, "--out", tmp_path / "m.npz", "--pool", "none", stdin=stdin).returncode == 0
    with np.load(tmp_path / "m.npz") as file:
        assert file["offsets"].tolist() == [0, 4, 4, 6, 12, 16] and file["ids"].tolist()[:4] == [5, 6, 7, 3]
        parts = np.split(file["memory"], file["offsets"][1:-1])
    for part, memory in zip(parts, encode(memory_bundle, LINES, pool="none"), strict=True):
        assert np.array_equal(part, memory)
    assert run_here("encode", memory_bundle, "--out", tmp_path / "none.npy", stdin=b"").returncode == 0
    assert np.load(tmp_path / "none.npy").shape == (0, 32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.npz", "none.npy", "v.npy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pool", "max"), "unknown pool 'max': did you mean 'mean'? valid: first, last, mean, none"),
        (("--backend", "trt"), "plans have no graph for the encoder alone: use --backend ort or eager"),
        (("--backend", "cpp"), "the C++ runtime runs the encoder alone only of programs: use --backend native or ort"),
        (("--variant", "trt"), "variant trt cannot run the encoder alone: use --variant fp32 or fp32-cpu or"),
        (("--variant", "int9"), "unknown variant 'int9'"),
        (("--out", "v.npz"), "--out v.npz: --pool mean gives a vector a line: name a .npy file"),
        (("--out", "v.npy", "--pool", "none"), "--out v.npy: --pool none gives a vector a token: name a .npz file"),
        (("--out", "nowhere/v.npy"), "nowhere/v.npy cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options: tuple[str, ...], message: str, memory_bundle: Path) -> None:
    assert message in failed_line(run_here("encode", memory_bundle, *options, stdin=b"w5\n"))


def test_lines_before_a_bad_one_are_printed(memory_bundle: Path) -> None:
    long = " ".join(["w5"] * 24)
    done = run_here("encode", memory_bundle, stdin=f"w5\nw6\n{long}\nw7\n".encode())
    assert len(done.stdout.splitlines()) == 2
    assert "line 3: a source of 25 tokens exceeds the limit of 24: split the line" in failed_line(done)
    later = b"w5\n" * 30_000  # more than one read of the input
    done = run_here("encode", memory_bundle, "--max-line-bytes", 6, stdin=b"w5\nw5 w6 w7\n" + later)
    assert len(done.stdout.splitlines()) == 1 and "line 2: longer than 6 bytes" in failed_line(done)
    with pytest.raises(LimitError), TextEncoder(EncoderOptions(memory_bundle)) as encoder:
        encoder.encode([long])
    with pytest.raises(DataError, match="lines: a single str"), TextEncoder(EncoderOptions(memory_bundle)) as encoder:
        encoder.encode("w5")


def test_a_bundle_without_it_says_what_to_do(bundle: Path) -> None:
    done = run_here("encode", bundle, stdin=b"w5\n")
    assert failed_line(done).endswith(
        "the standard graphs cannot run the encoder alone: export it again with --memory, or use eager"
    )
    assert len(printed(run_here("encode", bundle, "--backend", "eager", stdin=b"w5\nw6\n"))) == 2


@pytest.mark.long
def test_inspect_and_check_show_it(memory_bundle: Path, bundle: Path) -> None:
    shown = run_here("inspect", memory_bundle).stdout.decode()
    assert "  encode     fp32, fp32-cpu, int8, int8-latency, int4\n" in shown
    assert "  encode     " not in run_here("inspect", bundle).stdout.decode()
    done = run_here("check", memory_bundle, "--variant", "int8", "--invariance", 0).stdout.decode()
    assert "memory 5e-01" in done and "  memory            max difference " in done
    done = run_here("check", bundle, "--invariance", 0).stdout.decode()
    assert "memory" not in done


# The check


Mutation = Callable[[GraphProto], None]


def no_mask(graph: GraphProto) -> None:
    """Sentences see their padding: every length is the width."""
    shape = helper.make_node("Shape", ["src_ids"], ["both"])
    one = onnx.numpy_helper.from_array(np.array(1), "one_place")
    width = helper.make_node("Gather", ["both", "one_place"], ["wide"])
    cast = helper.make_node("Cast", ["wide"], ["wide32"], to=onnx.TensorProto.INT32)
    sizes = helper.make_node("Shape", ["src_lengths"], ["count"])
    full = helper.make_node("Expand", ["wide32", "count"], ["full_lengths"])
    graph.initializer.append(one)
    for node in graph.node:
        for i, name in enumerate(node.input):
            if name == "src_lengths":
                node.input[i] = "full_lengths"
    for node in reversed((shape, width, cast, sizes, full)):
        graph.node.insert(0, node)


def shifted(graph: GraphProto) -> None:
    """Every vector a little off."""
    node = producer(graph, "memory")
    node.output[list(node.output).index("memory")] = "before"
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.7, np.float32), "shift"))
    graph.node.append(helper.make_node("Add", ["before", "shift"], ["memory"]))


def not_a_number(graph: GraphProto) -> None:
    shifted(graph)
    change_tensor(graph, "shift", lambda _: np.array(np.nan, np.float32))


@pytest.mark.parametrize("mutate", [no_mask, shifted, not_a_number])
@pytest.mark.parametrize("variant", long_but(["fp32", "int8"], "fp32"))
def test_a_wrong_memory_fails(variant: str, mutate: Mutation, memory_bundle: Path, run: Path, tmp_path: Path) -> None:
    graph = "memory" if variant == "fp32" else f"{variant}/memory"
    broken = open_bundle(break_graph(memory_bundle, tmp_path / "broken", graph, mutate))
    gate = Gate(broken, run, threads=1)
    corpus = make_corpus(broken.config, broken.recipe, broken.tokenizers(), None)
    report = gate.run(["ort", "ort:int8"], gate.reference(corpus))
    passed = {engine.engine: engine.passed for engine in report.engines}
    wrong = "ort" if variant == "fp32" else "ort:int8"
    assert passed == {"ort": wrong != "ort", "ort:int8": wrong != "ort:int8"}
    (failure,) = report.failures
    assert failure.startswith(f"{wrong}: memory of sentence ") and " differs by " in failure
    assert ("nan" in failure) is (mutate is not_a_number)


def beyond_600(graph: GraphProto) -> None:
    """The other sign for the sentences behind the first 600."""
    node = producer(graph, "memory")
    node.output[list(node.output).index("memory")] = "before"
    for name, value in (("first", [0]), ("limit", [600]), ("last", [1 << 30]), ("axis", [0])):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), f"b_{name}"))
    graph.node.append(helper.make_node("Slice", ["before", "b_first", "b_limit", "b_axis"], ["b_kept"]))
    graph.node.append(helper.make_node("Slice", ["before", "b_limit", "b_last", "b_axis"], ["b_beyond"]))
    graph.node.append(helper.make_node("Neg", ["b_beyond"], ["b_negated"]))
    graph.node.append(helper.make_node("Concat", ["b_kept", "b_negated"], ["memory"], axis=0))


def test_a_memory_that_is_wrong_in_large_batches_alone_fails(memory_bundle: Path, run: Path, tmp_path: Path) -> None:
    broken = open_bundle(break_graph(memory_bundle, tmp_path / "broken", "memory", beyond_600))
    gate = Gate(broken, run, threads=1)
    corpus = make_corpus(broken.config, broken.recipe, broken.tokenizers(), None)
    (found,) = gate.run(["ort"], gate.reference(corpus)).engines
    assert found.memory and found.memory.many == 1024 and found.memory.largest < 1e-5
    assert found.failures[0].startswith("memory of 1,024 sentences at once differs from a few's by ")


def test_a_memory_that_stops_fails_its_engine_alone(memory_bundle: Path, run: Path, tmp_path: Path) -> None:
    broken = break_graph(memory_bundle, tmp_path / "broken", "memory", narrower)
    flags = ("--checkpoint", run, "--invariance", 0, "--max-tokens", 4, "--variant", "fp32", "--variant", "int8")
    done = run_here("check", broken, *flags, "--json")
    first, second = json.loads(done.stdout)["engines"]
    assert done.returncode == 3 and second["passed"] and second["memory"]
    assert any("memory.onnx returns 'memory' of [2, " in failure for failure in first["failures"])
    assert not first["passed"] and first["memory"] is None


def test_a_wrong_weight_is_named(memory_bundle: Path, run: Path, tmp_path: Path) -> None:
    """In the memory's graph alone."""

    def mutate(graph: GraphProto) -> None:
        change_tensor(graph, "encoder_norm.bias", lambda bias: bias + np.float32(3e-5))

    broken = open_bundle(break_graph(memory_bundle, tmp_path / "broken", "memory", mutate))
    gate = Gate(broken, run, threads=1)
    corpus = make_corpus(broken.config, broken.recipe, broken.tokenizers(), None)
    report = gate.run(["ort"], gate.reference(corpus))
    assert any("constant encoder_norm.bias of memory.onnx differs from the checkpoint's" in f for f in report.failures)


def test_numbers_that_are_none_are_refused(memory_bundle: Path, tmp_path: Path) -> None:
    broken = break_graph(memory_bundle, tmp_path / "broken", "memory", not_a_number)
    with pytest.raises(NotNumbers, match="line 2: NaN or infinite encoder outputs"):
        encode(broken, ["", "w5"])


def test_lines_before_one_without_numbers_are_given(memory_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are by length: the first of them has line 4."""
    with TextEncoder(EncoderOptions(memory_bundle, threads=1, batch_tokens=4)) as encoder:
        memory = encoder.engine.memory

        def without_w9(ids: Any, lengths: Any) -> Any:
            return np.where((ids == 9).any(1)[:, None, None], np.nan, memory(ids, lengths))

        monkeypatch.setattr(encoder.engine, "memory", without_w9)
        found = encoder.results(["w5 w6 w7", "w9 w6 w7 w8", "w5", "w9"])
        assert next(found).ids == encoder.tokenizers.source_ids("w5 w6 w7")
        with pytest.raises(NotNumbers, match="line 2: NaN or infinite encoder outputs"):
            next(found)


def test_a_failed_check_leaves_no_bundle(run: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "strict.toml"
    recipe.write_text("memory = true\n[tolerance]\nmemory = 1e-12\n")
    with pytest.raises(ParityError, match="ort: memory of sentence"):
        export_checked(run, tmp_path / "out", [str(recipe)])
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_stored_reference_has_it(memory_bundle: Path, run: Path, tmp_path: Path) -> None:
    file = tmp_path / "reference.npz"
    assert run_here("check", memory_bundle, "--save-reference", file, "--invariance", 0).returncode == 0
    copy = shutil.copytree(memory_bundle, tmp_path / "elsewhere" / "bundle")
    done = run_here("check", copy, "--reference", file, "--json")
    (first, *_) = json.loads(done.stdout)["engines"]
    assert done.returncode == 0 and 0 < first["memory"]["largest"] < 1e-5 and first["memory"]["cosine"] > 0.999999
    broken = break_graph(copy, tmp_path / "elsewhere" / "broken", "memory", shifted)
    done = run_here("check", broken, "--reference", file, "--variant", "fp32")
    assert done.returncode == 3 and "FAILED: memory of sentence" in done.stdout.decode()


# What a bundle says of it must be so


def narrower(graph: GraphProto) -> None:
    """A number less for each token than the graph says."""
    node = producer(graph, "memory")
    node.output[list(node.output).index("memory")] = "before"
    # Where it begins is computed, so that nobody sees the size before it runs.
    for name, value in (("zero", [0]), ("end", [31]), ("axis", [2])):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    graph.node.append(helper.make_node("Shape", ["src_lengths"], ["batch_size"]))
    graph.node.append(helper.make_node("Mul", ["batch_size", "zero"], ["begin"]))
    graph.node.append(helper.make_node("Slice", ["before", "begin", "end", "axis"], ["memory"]))


def test_a_graph_of_another_model_is_refused(memory_bundle: Path, tmp_path: Path) -> None:
    broken = break_graph(memory_bundle, tmp_path / "broken", "memory", narrower)
    with pytest.raises(EngineError, match=r"memory\.onnx returns 'memory' of \[1, 2, 31\]: export the bundle again"):
        encode(broken, ["w5"])
    damaged = Path(shutil.copytree(memory_bundle, tmp_path / "damaged"))
    (damaged / "memory.onnx").write_bytes((damaged / "memory.onnx").read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=r"memory\.onnx does not match its SHA-256"):
        encode(damaged, ["w5"])
    (damaged / "memory.onnx").unlink()
    with pytest.raises(ArtifactError, match=r"memory\.onnx"):
        encode(damaged, ["w5"])


def test_a_recipe_asks_for_it_too() -> None:
    assert recipe_from_dict({"memory": True}).memory
    with pytest.raises(ConfigError, match="memory = true with target = 'trt'"):
        Recipe(target="trt", cache="static", memory=True)
