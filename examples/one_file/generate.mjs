// Generates in Node from what `tformer export RUN --layout one-file --out FOLDER` writes; needs npm install onnxruntime-node.
// node generate.mjs FOLDER/generate.onnx BEAMS ID... prints the best output's ids. The source's ids include its end token.
import { InferenceSession, Tensor } from "onnxruntime-node";

const [file, beams, ...source] = process.argv.slice(2);
const session = await InferenceSession.create(file);
const ints = (values, shape = [values.length]) => new Tensor("int32", Int32Array.from(values), shape);
const { ids, lengths } = await session.run(
  {
    src_ids: ints(source, [1, source.length]),
    src_lengths: ints([source.length]),
    beams: ints([beams]),
    n_best: ints([1]),
    max_tokens: ints([256]),
    min_tokens: ints([0]),
    length_penalty: new Tensor("float64", [1], [1]),
    repetition_penalty: new Tensor("float32", [1], [1]),
    no_repeat_ngram: ints([0]),
    suppress: ints([-1]),
    bad_words: ints([-1], [1, 1]),
    first_ids: ints([-1], [1, 1]),
  },
  ["ids", "lengths"],
);
console.log(ids.data.slice(0, lengths.data[0]).join(" "));
