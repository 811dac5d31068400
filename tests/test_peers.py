"""The logic of benchmarks/peers; needs no peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.peers.__main__ import add_quality
from benchmarks.peers.measure import Trial, add_ratios, choose, compare, speed_ratios
from benchmarks.peers.points import EOS_ID, base_points, check_point, corpus_points
from benchmarks.peers.report import _quality, machine_name, setting_name, table
from benchmarks.peers.serve import check
from benchmarks.peers.sides import batchings, ctranslate2_sides, eager_sides, library_sides, openvino_sides, our_sides


def trial(side: str, *seconds: float, point: str = "b1k1") -> Trial:
    return Trial(side, point, {"threads": 1}, {}, list(seconds), "" if seconds else "it broke")


def test_the_fastest_setting_of_each_side_is_chosen_and_failures_never_are() -> None:
    trials = [trial("ort", 3.0, 2.0), trial("ort", 2.5), trial("ort", 1.0, point="b8k1"), trial("eager")]
    assert choose(trials, "b1k1") == {"ort": trials[0]}


def test_ratios_are_taken_within_rounds_against_the_fastest_of_each_reference() -> None:
    def side(*seconds: float, limit: str = "") -> dict[str, Any]:
        both = {"seconds": list(seconds), "cpu_seconds": [2 * each for each in seconds]}
        return {**both, "seconds_median": sorted(seconds)[1], "limit": limit}

    results = {
        "CTranslate2 int8": side(2.0, 6.0, 2.0),
        "CTranslate2 int8, avx2": side(1.0, 1.0, 1.0, limit="avx2"),
        "CTranslate2 float32": side(9.0, 9.0, 9.0),
        "eager PyTorch float32": {"error": "it broke"},
        "ort:int8": side(1.0, 3.0, 4.0),
        "native native-int8, avx2": side(0.5, 0.25, 0.5, limit="avx2"),
    }
    add_ratios(results)
    beside = results["ort:int8"]["speed_beside"]
    assert beside["CTranslate2"] == {"side": "CTranslate2 int8", "rounds": [2.0, 2.0, 0.5], "median": 2.0, "cpu": 2.0}
    limited = results["native native-int8, avx2"]["speed_beside"]
    assert list(limited) == ["CTranslate2"] and limited["CTranslate2"]["rounds"] == [2.0, 4.0, 2.0]
    assert beside["CTranslate2 float32"]["rounds"] == [9.0, 3.0, 2.25]
    assert "eager PyTorch" not in beside
    with pytest.raises(ValueError, match="shorter"):
        speed_ratios([1.0, 2.0], [1.0])


def test_each_variable_of_a_setting_has_its_word() -> None:
    sides = ctranslate2_sides(["int8"], 2, ["avx512f"], ["avx2"])
    described = [(each, setting_name({"setting": each, "batching": {}})) for side in sides for each in side.settings]
    assert {" MKL" in name for _, name in described} == {True, False}
    for setting, name in described:
        env = setting.get("env", {})
        assert ("no MKL" in name) == (env.get("CT2_USE_MKL") == "0")
        assert (" MKL" in name) == ("CT2_USE_MKL" in env) and ("packed" in name) == ("CT2_PACKED_GEMM" in env)
        assert ("forced" in name) == ("CT2_FORCE_CPU_ISA" in env)


def test_equal_outputs_and_how_far_their_scores_are_apart() -> None:
    one = {"outputs": [[4], [5], [6]], "scores": [-1.0, -2.0, -3.0]}
    other = {"outputs": [[4], [9], [6]], "scores": [-1.5, -9.0, -3.0]}
    assert compare(one, other) == {"sentences": 3, "equal": 2, "score_max": 0.5}


def test_points_are_the_same_each_time_and_end_with_eos() -> None:
    points = [*base_points(100), check_point(100)]
    assert points == [*base_points(100), check_point(100)]
    assert [point.name for point in base_points(100)] == ["b1k1", "b8k1", "b32k1", "b1k4", "b8k4", "b32k4"]
    for point in points:
        for ids in point.sources:
            assert ids[-1] == EOS_ID and all(4 <= i < 100 for i in ids[:-1])
    assert {len(ids) for ids in points[2].sources} == {20}


def test_outputs_of_another_length_or_number_are_refused() -> None:
    point = {"sources": [[4, 3], [5, 3]], "max_tokens": 2, "exact": True}
    check(point, [[4, 4], [5, 5]])
    for wrong in ([[4, 4]], [[4, 4], [5]], [[4, 4, 4], [5, 5, 5]]):
        with pytest.raises(ValueError, match="outputs"):
            check(point, wrong)
    check({**point, "exact": False}, [[4], []])


def test_settings_split_batches_among_workers_and_name_themselves() -> None:
    peer = ctranslate2_sides({"int8", "float32"}, 2, ["avx2", "avx512f"])[0]
    threads = [(setting["intra_threads"], setting["inter_threads"]) for setting in peer.settings]
    assert threads == [(1, 1), (2, 1), (1, 2)] * 6
    assert peer.settings[-7]["env"] == {"CT2_FORCE_CPU_ISA": "AVX512", "CT2_USE_MKL": "0"}
    assert peer.settings[-4]["env"] == {"CT2_FORCE_CPU_ISA": "AVX512", "CT2_USE_MKL": "1"}
    assert peer.settings[-1]["env"]["MKL_ENABLE_INSTRUCTIONS"] == "AVX512_E1"
    older = ctranslate2_sides({"int8", "float32"}, 2, ["avx2"])[0]
    assert {setting.get("env", {}).get("CT2_FORCE_CPU_ISA") for setting in older.settings} == {None, "AVX2"}
    limited = ctranslate2_sides({"int8", "float32"}, 2, ["avx2", "avx512f"], ["avx2"])
    assert [side.limit for side in limited] == ["", "", "avx2"]
    assert {setting["env"]["CT2_FORCE_CPU_ISA"] for setting in limited[2].settings} == {"AVX2"}
    batch, corpus = base_points(100)[2], corpus_points([[4, 3]])[0]
    assert batchings(peer, peer.settings[2], batch) == [{"max_batch_size": 16}]
    assert len(batchings(peer, peer.settings[2], corpus)) == 7
    ours = our_sides(["ort:int8"], 2)[0]
    assert ours.ours and batchings(ours, ours.settings[0], batch) == [{}]
    assert len(ours.settings) == 2 and len(our_sides(["ort"], 1)[0].settings) == 1
    library = library_sides(["native-int8"], 2, "libtformer.so")[0]
    assert library.ours and len(library.settings) == 2 and batchings(library, library.settings[0], batch) == [{}]
    forced = library_sides(["native-int8"], 2, "libtformer.so", ["avx512"])[1]
    assert forced.limit == "avx512" and forced.settings[0]["kernels"] == "avx512"
    assert not eager_sides(2, {}, True)[0].ours
    (openvino,) = openvino_sides(2)
    assert [point.name for point in base_points(100) if openvino.can(point)] == ["b1k1", "b8k1", "b32k1"]
    assert batchings(openvino, openvino.settings[0], batch) == [{"max_batch_size": 32}]
    described = {"setting": openvino.settings[3], "batching": {"max_batch_size": 64}}
    assert setting_name(described) == "bf16 2x1 64 examples"
    described = {"setting": peer.settings[2], "batching": {"max_batch_size": 2048, "batch_type": "tokens"}}
    assert setting_name(described) == "int8 1x2 2048 tokens"
    compiled = {"setting": eager_sides(2, {}, True)[0].settings[-1], "batching": {}}
    assert setting_name(compiled) == "2x1 compiled"


def test_what_eager_was_not_measured_with_is_not_compared() -> None:
    pytest.importorskip("sacrebleu")
    work: Any = SimpleNamespace(
        references=["a b", "c"],
        bundle=SimpleNamespace(tokenizers=lambda: SimpleNamespace(target_text=lambda ids: " ".join(map(str, ids)))),
    )

    def results(*names: str) -> dict[str, Any]:
        found: dict[str, Any] = {name: {"outputs": [[4, 5], [6]], "sentences_per_second": 10.0} for name in names}
        found["ort"]["outputs"] = [[4, 5], [7]]
        add_quality(found, work)
        return found

    alone, beside = results("ort"), results("ort", "eager PyTorch float32")
    assert "equal_to_eager" not in alone["ort"] and beside["ort"]["equal_to_eager"] == 1
    for found, phrase in ((alone, " cased; 10 sentences/s"), (beside, " cased; 1 sentences equal to eager; 10 sent")):
        quality = _quality({"greedy": found})
        assert quality is not None and phrase in quality[1][0][1]


def test_names_of_machines_and_tables() -> None:
    assert machine_name("Intel(R) Xeon(R) Processor", "2") == "xeon-2core"
    assert machine_name("AMD EPYC", "2") == "epyc-2core"
    assert table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |"]
