#!/bin/sh
# A corpus in shards: examples/corpus.sh BUNDLE OUT FILE.jsonl... translates the member "text" of each line.
# Kill it and run it again: it translates only what is missing. docs/corpus.md has every option.
set -eu
bundle=$1 out=$2
shift 2
for file in "$@"; do set -- "$@" --in "$file"; shift; done

# Whole files of about 20,000 lines, and one file of them all. --strict: the first bad line stops the job.
tformer corpus "$bundle" "$@" --column text --out "$out" --merge --strict

# The manifest has one line for each shard: where its lines come from, and the SHA-256 of what was written.
wc -l < "$out/manifest.jsonl"
cat "$out/merged.jsonl"
