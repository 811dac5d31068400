"""A Hugging Face folder: import it, export it, and compare the bundle's translations with `generate`.

    python examples/hugging_face.py .demo/numbers-en-de 'forty-two' 'seven hundred'

The folder may be of any family in docs/import.md whose tokenizer needs no languages (add --src-lang and --tgt-lang
otherwise). Both decode with the folder's own generation config, up to 64 tokens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import transformers

import tformer_deploy

LONGEST = 64


def tformer(*arguments: str | Path) -> None:
    """Run the command. It exits with 3 where the import or the export differs from the original."""
    subprocess.run([sys.executable, "-m", "tformer_deploy", *arguments], check=True)


def make_bundle(folder: str, work: Path) -> Path:
    """Import and export; both compare with the original."""
    tformer("import", folder, "--out", work / "run")
    tformer("export", work / "run", "--out", work / "bundle", "--recipe", "fp32-cpu")
    return work / "bundle"


def generate(folder: str, lines: list[str]) -> list[str]:
    """What transformers makes of the lines."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    ids = model.generate(**tokenizer(lines, padding=True, return_tensors="pt"), max_new_tokens=LONGEST)
    return list(tokenizer.batch_decode(ids, skip_special_tokens=True))


def main() -> None:
    """Print each line's translation by the bundle; fail where it is not that of transformers."""
    folder, *lines = sys.argv[1:]
    with tempfile.TemporaryDirectory() as work, tformer_deploy.load(make_bundle(folder, Path(work))) as translator:
        ours = [result.text for result in translator.translate(lines, max_tokens=LONGEST)]
    if ours != generate(folder, lines):
        raise SystemExit("the bundle and transformers differ")
    print(*ours, sep="\n")


if __name__ == "__main__":
    main()
