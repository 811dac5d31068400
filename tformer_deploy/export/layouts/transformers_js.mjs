// Generates with transformers.js: node --input-type=module --eval THIS REQUEST, in a folder whose node_modules has
// @huggingface/transformers. The request is a JSON file; its `out` receives the tokens of each source, cut at the end.
import { readFileSync, writeFileSync } from "node:fs";

const request = JSON.parse(readFileSync(process.argv.at(-1), "utf-8"));
const { AutoModelForSeq2SeqLM, Tensor, env } = await import("@huggingface/transformers");
env.allowRemoteModels = false;
const model = await AutoModelForSeq2SeqLM.from_pretrained(request.folder, {
  dtype: request.dtype,
  local_files_only: true,
});
const { pad_token_id: pad, eos_token_id } = model.generation_config;
const ends = [eos_token_id].flat();

function tensor(rows, width, fill) {
  const values = rows.flatMap((row) => [...row, ...Array(width - row.length).fill(fill)]);
  return new Tensor("int64", BigInt64Array.from(values, BigInt), [rows.length, width]);
}

const found = [];
for (let i = 0; i < request.sources.length; i += request.batch) {
  const rows = request.sources.slice(i, i + request.batch);
  const width = Math.max(...rows.map((row) => row.length));
  const outputs = await model.generate({
    input_ids: tensor(rows, width, pad),
    attention_mask: tensor(rows.map((row) => row.map(() => 1)), width, 0),
    max_length: request.max_length,
  });
  for (const [, ...ids] of outputs.tolist().map((row) => row.map(Number))) {
    const end = ids.findIndex((id) => ends.includes(id));
    found.push(end < 0 ? ids : ids.slice(0, end));
  }
}
writeFileSync(request.out, JSON.stringify(found));
