// Bergamot's translator, compiled to WebAssembly, as a side of benchmarks.students: what browsers' extensions run.
// usage: node bergamot.mjs STUDENT NODE_MODULES   requests and replies as in tformer_deploy/base/processes.py
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { Worker } from "node:worker_threads";

const [student, modules] = process.argv.slice(2);
const folder = join(modules, "@browsermt/bergamot-translator");
const read = (begin, end) => {
  const name = readdirSync(student).find((each) => each.startsWith(begin) && each.endsWith(end));
  return new Uint8Array(readFileSync(join(student, name))).buffer;
};
const pair = { from: "a", to: "b" };
const script = join(folder, "worker/translator-worker.js");
const where = `var __filename = ${JSON.stringify(script)}, __dirname = ${JSON.stringify(join(folder, "worker"))};`;
// By its text, as Node takes the file for a module, which it is not.
const worker = new Worker(where + readFileSync(script, "utf-8"), { eval: true });
const waiting = new Map();
worker.on("message", ({ id, result, error }) => {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  error ? reject(Error(error.message)) : resolve(result);
});
worker.on("error", (error) => {
  throw error;
});
let last = 0;
const call = (name, ...args) =>
  new Promise((resolve, reject) => {
    waiting.set(++last, { resolve, reject });
    worker.postMessage({ id: last, name, args });
  });

const translate = async (lines) => {
  const texts = lines.map((text) => ({ text, html: false, qualityScores: false }));
  return (await call("translate", { models: [pair], texts })).map((each) => each.target.text.trim());
};

const calls = {
  versions: () => ({
    bergamot: JSON.parse(readFileSync(join(folder, "package.json"), "utf-8")).version,
    node: process.version,
  }),
  run: async ({ lines, batches }) => {
    const wall = performance.now(), cpu = process.cpuUsage(), outputs = [];
    for (const each of batches ? [lines] : lines.map((line) => [line])) outputs.push(...(await translate(each)));
    const { user, system } = process.cpuUsage(cpu);
    return { wall: (performance.now() - wall) / 1e3, cpu: (user + system) / 1e6, outputs };
  },
};

await call("initialize", {});
const vocabulary = read("vocab.", ".spm");
await call("loadTranslationModel", pair, {
  model: read("model.", ".bin"),
  shortlist: read("lex.", ".s2t.bin"),
  vocabs: [vocabulary, vocabulary],
});
for await (const line of createInterface({ input: process.stdin })) {
  const { call: name, ...given } = JSON.parse(line);
  process.stdout.write(`${JSON.stringify({ value: await calls[name](given) })}\n`);
}
await worker.terminate();
