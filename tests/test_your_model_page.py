"""docs/your-model.md as it is written: its file, its commands; and the third way, the protocol, through a file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tformer_deploy.base.errors import ArtifactError
from tformer_deploy.bundle.manifest import open_bundle
from tformer_deploy.importers.run import recognised

from .command import COMMAND, printed, run_here

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/your-model.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python (\S+)\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for text in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in text.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands run."""
    made = tmp_path_factory.mktemp("page")
    assert {name for name, _ in FILES} == {"my_model.py", "other_family.py"}
    for file in {name for name, _ in FILES}:
        (made / file).write_text("\n\n".join(text for name, text in FILES if name == file))
    bert2bert(made / "bert2bert")
    return made


def bert2bert(folder: Path) -> None:
    """A folder of a family that `tformer import` does not know."""
    import torch
    import transformers

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    bert = transformers.BertConfig(vocab_size=50, max_position_embeddings=40, **sizes)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)
    model = transformers.EncoderDecoderModel(config)
    ids = {"decoder_start_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(folder)
    with pytest.raises(ArtifactError, match=r"model type 'encoder-decoder' cannot be imported, .* docs/your-model.md"):
        recognised(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command: str, folder: Path) -> None:
    """In order: later ones use what earlier ones made."""
    script = f'tformer() {{ {shlex.join(COMMAND)} "$@"; }}; {command}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr.startswith("running ") == (".py:make" in command)


def test_a_module_that_follows_the_protocol_has_every_recipe(tmp_path: Path) -> None:
    (tmp_path / "my_file.py").write_text(
        "from tests.conftest import small_config\nfrom tests.test_seq2seq import make_parallel\n\n\n"
        "def make():\n    return make_parallel(small_config(output_bias=True))\n"
    )
    done = run_here(
        "export", tmp_path / "my_file.py:make", "--out", tmp_path / "bundle", "--recipe", "int8", "--recipe", "fp32"
    )
    assert printed(done)[-1] == f"{tmp_path / 'bundle'}: bundle written"
    assert done.stderr.decode() == f"running {tmp_path}/my_file.py\n" * 2
    opened = open_bundle(tmp_path / "bundle")
    assert opened.default == "int8" and not opened.config.module_parameters
    assert printed(run_here("translate", tmp_path / "bundle", stdin=b"w7 w9\n")) != [""]
