"""The least script that translates one sentence with tformer: BUNDLE BACKEND VARIANT MAX_TOKENS TEXT."""

import sys

import tformer_deploy

bundle, backend, variant, max_tokens, text = sys.argv[1:]
with tformer_deploy.load(bundle, backend, variant=variant or None, max_tokens=int(max_tokens)) as translator:
    print(" ".join(map(str, translator.translate([text])[0].ids)))
