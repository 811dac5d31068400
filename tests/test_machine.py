"""What a process may take: parameters that are counted, limits and quotas of control groups, and what is said."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy import load
from tformer_deploy.base.errors import ConfigError
from tformer_deploy.base.machine import GIB, available_bytes, cores
from tformer_deploy.model.checkpoint import require_memory
from tformer_deploy.model.config import ModelConfig
from tformer_deploy.model.network import Transformer
from tformer_deploy.train.runs import init_checkpoint

from .command import failed_line, run_here
from .configs import CONFIGS as GRAPHS
from .configs import SSRU
from .conftest import small_config
from .cpp_programs import program

UNLIMITED = 9223372036854771712


@pytest.mark.parametrize("sharing", ["none", "decoder", "all"])
def test_parameters_are_counted_without_making_them(sharing: str) -> None:
    for positions, sides, output_bias, norm in product(
        ("sinusoidal", "learned", "relative"),
        ("both", "encoder", "decoder", ""),
        (True, False),
        ("standard", "annotated"),
    ):
        config = small_config(
            share_embeddings=sharing,
            src_vocab=60 if sharing == "all" else 70,
            positions=positions,
            final_norm=bool(sides),
            final_norm_sides=sides or "both",
            output_bias=output_bias,
            norm=norm,
            relative_per_layer=norm == "standard",
            encoder_layers=3,
        )
        with torch.device("meta"):
            model = Transformer(config)
        assert config.parameters == sum(each.numel() for each in model.parameters())


IDS: dict[str, dict[str, object]] = {
    "other ids": {"pad_id": 0, "bos_id": 4, "eos_id": 1, "dropout": 0.0, "attention_dropout": 0.2},
    "the same, learned": {"pad_id": 0, "positions": "learned", "max_positions": 17, "activation_dropout": 0.3},
}
"""What graphs do not differ by, and what a checkpoint with our tokenizer cannot have."""
CONFIGS = {**GRAPHS, **IDS, "a recurrent cell": SSRU}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_has_the_parameters_of_its_model(name: str) -> None:
    config = small_config(**CONFIGS[name])
    with torch.device("meta"):
        model = Transformer(config)
    assert config.parameters == sum(each.numel() for each in model.parameters())


def test_every_field_of_a_model_is_in_one_of_these_configs() -> None:
    """What is new in `ModelConfig` belongs into `CONFIGS` of test_variant_graphs.py, with another value."""
    configs, usual = [small_config(**changes) for changes in CONFIGS.values()], small_config()
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    same = [name for name in names if all(getattr(each, name) == getattr(usual, name) for each in configs)]
    assert same == ["module_parameters"], "which is of modules of the user's own"


def machine(root: Path, files: dict[str, str]) -> Path:
    """The files of a machine's kernel."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:   5000 kB\n"}
GROUP1 = {"proc/self/cgroup": "5:cpu:/\n4:memory:/jobs/7\n0::/\n"}
GROUP2 = {"proc/self/cgroup": "0::/jobs/7\n"}


def usage1(group: str, most: int, used: int) -> dict[str, str]:
    """A control group of version 1 in which 300 bytes are files."""
    folder = f"sys/fs/cgroup/memory{group}"
    stat = "rss 5\ninactive_file 100\nactive_file 200\ntotal_inactive_file 900\n"
    sizes = {"limit_in_bytes": f"{most}\n", "usage_in_bytes": f"{used}\n", "stat": stat}
    return {f"{folder}/memory.{name}": text for name, text in sizes.items()}


def usage2(group: str, most: object, used: int) -> dict[str, str]:
    """The same of version 2."""
    sizes = {"max": f"{most}\n", "current": f"{used}\n", "stat": "anon 5\ninactive_file 100\nactive_file 200\n"}
    return {f"sys/fs/cgroup{group}/memory.{name}": text for name, text in sizes.items()}


def quota1(group: str, microseconds: int) -> dict[str, str]:
    """What a control group of version 1 may take of each 0.1 s."""
    folder = f"sys/fs/cgroup/cpu{group}"
    return {f"{folder}/cpu.cfs_quota_us": f"{microseconds}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (MEMINFO, 5000 * 1024),
        ({"proc/meminfo": "MemTotal:  9000 kB\n"}, None),
        ({**MEMINFO, **GROUP1}, 5000 * 1024),
        ({**MEMINFO, **GROUP1, **usage1("/jobs/7", 10_000, 4_000)}, 6_300),
        ({**MEMINFO, **GROUP1, **usage1("/jobs/7", UNLIMITED, 4_000)}, 5000 * 1024),
        ({**MEMINFO, **GROUP1, **usage1("/jobs/7", UNLIMITED, 4_000), **usage1("/jobs", 9_000, 8_000)}, 1_300),
        ({**MEMINFO, **GROUP1, **usage1("", 8_000, 4_000)}, 4_300),
        ({**MEMINFO, **GROUP2, **usage2("/jobs/7", 10_000, 4_000), **usage2("/jobs", "max", 4_000)}, 6_300),
        ({**MEMINFO, **GROUP2, **usage2("/jobs/7", "max", 4_000)}, 5000 * 1024),
        ({**MEMINFO, "proc/self/cgroup": "0::/../..\n", **usage2("", 10_000, 4_000)}, 6_300),
        ({**GROUP2, **usage2("/jobs/7", 10_000, 4_000)}, 6_300),
    ],
)
def test_the_narrowest_limit_counts(files: dict[str, str], free: int | None, tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, files)) == free


QUOTAS: list[tuple[dict[str, str], int]] = [
    ({}, 4),
    ({**GROUP2, "sys/fs/cgroup/jobs/7/cpu.max": "150000 100000\n"}, 2),
    ({**GROUP2, "sys/fs/cgroup/jobs/7/cpu.max": "max 100000\n", "sys/fs/cgroup/jobs/cpu.max": "1000 100000\n"}, 1),
    ({**GROUP2, "sys/fs/cgroup/jobs/7/cpu.max": "6400000 100000\n"}, 4),
    ({**GROUP1, **quota1("", 300_000)}, 3),
    ({**GROUP1, **quota1("", -1)}, 4),
    ({"proc/self/cgroup": "3:cpu,cpuacct:/docker/4\n", **quota1("", 250_000)}, 3),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "garbage\n"}, 4),
]


@pytest.mark.parametrize(("files", "count"), QUOTAS)
def test_a_quota_is_worth_cores(
    files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert cores(machine(tmp_path, files)) == count


@pytest.mark.parametrize(("files", "count"), QUOTAS)
def test_cpp_reads_the_same_quotas(files: dict[str, str], count: int, tmp_path: Path) -> None:
    command = [program("cores"), machine(tmp_path, files)]
    quota = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert min(4, quota or 4) == count


def test_this_machine_is_known() -> None:
    if Path("/proc/meminfo").is_file():
        free = available_bytes()
        assert free and free > 1 << 20


def test_both_numbers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(src_vocab=32000, tgt_vocab=32000)
    need = 4 * (4 * config.parameters + 512 * 512)
    monkeypatch.setattr("tformer_deploy.base.machine.available_bytes", lambda: need)
    require_memory(config, "training", 4)
    monkeypatch.setattr("tformer_deploy.base.machine.available_bytes", lambda: need - 1)
    with pytest.raises(ConfigError, match=r"^training needs 0\.9 GiB of memory at least, for 60,5.*, and 0\.9 GiB are"):
        require_memory(config, "training", 4)
    require_memory(config, "the model")
    monkeypatch.setattr("tformer_deploy.base.machine.available_bytes", lambda: None)
    require_memory(ModelConfig(src_vocab=1 << 24, tgt_vocab=1 << 24, d_model=1 << 16), "a giant")


TRAIN = ("train", "--task", "copy", "--preset", "tiny", "--updates", 1, "--out")


def test_what_does_not_fit_is_refused_before_it_is_made(
    run: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("a model is made")

    out = tmp_path / "out"
    monkeypatch.setattr("tformer_deploy.model.network.Transformer.__init__", forbidden)
    for arguments in (
        ("--set", "model.encoder_layers=2048", "--set", "model.d_model=65536"),
        ("--set", "model.d_ff=1048576", "--set", "model.d_model=65536"),
    ):
        line = failed_line(run_here(*TRAIN, out, *arguments))
        assert "training needs " in line and " GiB of memory at least, for " in line and " GiB are free" in line
        line = failed_line(run_here("init", "--preset", "tiny", "--vocab-size", 60, "--out", out, *arguments))
        assert "the model needs " in line and " GiB are free" in line
    assert "d_ff=1000000000000: must be at most 1048576" in failed_line(
        run_here("init", "--preset", "tiny", "--out", out, "--set", "model.d_ff=1000000000000")
    )
    assert run_here("init", "--preset", "tiny", "--out", out, "--vocab-size", 10**9).returncode == 2
    with pytest.raises(ConfigError, match="src_vocab=1000000000: must be at most 16777216"):
        init_checkpoint(out, "tiny", 10**9, 1, {})
    monkeypatch.setattr("tformer_deploy.base.machine.available_bytes", lambda: GIB // 10_000)
    with pytest.raises(ConfigError, match=r"^the model of .*run needs 0\.0 GiB"):
        load(bundle, "eager")
    assert "training needs" in failed_line(run_here(*TRAIN, out))
    assert not out.exists()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_freed_memory_is_kept_until_it_is_given_back() -> None:
    lines = """
import ctypes, mmap
from tformer_deploy.base.machine import give_back_freed_memory, keep_freed_memory
libc, size = ctypes.CDLL(None), 32 << 20
libc.malloc.restype, libc.memset.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * mmap.PAGESIZE / size
keep_freed_memory()
blocks = [libc.malloc(size) for _ in range(4)]
for block in blocks: libc.memset(block, 1, size)
last, before = libc.malloc(100), resident()
for block in blocks: libc.free(block)
kept = resident()
give_back_freed_memory()
print(round(before - kept), round(before - resident()))
"""
    assert subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True).stdout.split() == ["0", "4"]
