#include "ort/engines.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace tformer {

std::unique_ptr<Engine> make_engine(std::shared_ptr<const Graphs> graphs) {
  return graphs->recipe().target == "onnx" ? make_growing(std::move(graphs)) : make_in_place(std::move(graphs));
}

void check_request(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                   const Model& model, const Limits& limits) {
  const auto refuse = [](const std::string& message) { throw Error(Status::limit, message); };
  const auto batch = static_cast<std::int64_t>(src_lengths.size());
  const std::int64_t width = batch ? static_cast<std::int64_t>(src_ids.size()) / batch : 0;
  if (batch > limits.batch) {
    refuse("a batch of " + std::to_string(batch) + " sentences exceeds the limit of " + std::to_string(limits.batch) +
           ": send fewer at once");
  }
  if (width > limits.src_tokens) {
    refuse("a source of " + std::to_string(width) + " tokens exceeds the limit of " +
           std::to_string(limits.src_tokens) +
           ": split it, or export a model with a larger src_len axis and max_positions");
  }
  const auto [least, most] = std::minmax_element(src_lengths.begin(), src_lengths.end());
  if (src_ids.empty() || *least < 1 || *most > width) {
    refuse("source lengths must be between 1 and the width " + std::to_string(width) + " of the ids");
  }
  const auto [low, high] = std::minmax_element(src_ids.begin(), src_ids.end());
  if (*low < 0 || *high >= model.src_vocab) {
    refuse("token id " + std::to_string(*low < 0 ? *low : *high) + " is outside the source vocabulary of " +
           std::to_string(model.src_vocab));
  }
}

void check_step(std::int64_t beams, std::int64_t position, const Limits& limits) {
  if (beams > limits.beams) {
    throw Error(Status::limit, std::to_string(beams) + " beams exceed the limit of " + std::to_string(limits.beams) +
                                   ": use fewer, or export with a larger beams axis (at most half the vocabulary "
                                   "unless top_k is set)");
  }
  if (position >= limits.tgt_tokens) {
    throw Error(Status::limit, "decoding step " + std::to_string(position + 1) + " exceeds the limit of " +
                                   std::to_string(limits.tgt_tokens) + " target tokens");
  }
}

std::vector<Ort::Value> encode(const Graphs& graphs, std::vector<std::int32_t>& src_ids,
                               std::vector<std::int32_t>& src_lengths) {
  check_request(src_ids, src_lengths, graphs.model(), graphs.recipe().limits);
  const auto batch = static_cast<std::int64_t>(src_lengths.size());
  const std::vector<std::string> names = cache_names("cross", graphs.model());
  const std::int64_t src_len = static_cast<std::int64_t>(src_ids.size()) / batch;
  const Ort::Value ids = tensor(src_ids, {batch, src_len});
  const Ort::Value lengths = tensor(src_lengths, {batch});
  const std::string ids_name = "src_ids", lengths_name = "src_lengths";
  std::vector<Ort::Value> cross;
  for (std::size_t i = 0; i < names.size(); ++i) cross.emplace_back(nullptr);
  Feed feed;
  feed.input(ids_name, ids);
  feed.input(lengths_name, lengths);
  for (std::size_t i = 0; i < names.size(); ++i) feed.output(names[i], cross[i]);
  graphs.run(Graphs::encoder, feed);
  for (std::size_t i = 0; i < names.size(); ++i) cross[i] = Ort::Value(feed.outputs[i]);
  const std::vector<std::int64_t> wanted = {batch, graphs.model().heads, src_len, graphs.model().head_dim};
  for (std::size_t i = 0; i < names.size(); ++i) {  // a graph says which sizes are the same, and nobody compares
    const std::vector<std::int64_t> found = cross[i].GetTensorTypeAndShapeInfo().GetShape();
    if (found == wanted) continue;
    throw Error(Status::bundle, graphs.bundle().graph("encoder", graphs.variant()).string() + ": it gave '" + names[i] +
                                    "' of " + shown(found) + ", not of " + shown(wanted) +
                                    ": export the bundle again");
  }
  return cross;
}

std::vector<Ort::Value> gathered(const std::vector<Ort::Value>& values, const std::vector<std::int32_t>& sentences) {
  std::vector<Ort::Value> kept;
  for (const Ort::Value& value : values) {
    std::vector<std::int64_t> shape = value.GetTensorTypeAndShapeInfo().GetShape();
    const auto size = static_cast<std::size_t>(shape[1] * shape[2] * shape[3]);
    shape[0] = static_cast<std::int64_t>(sentences.size());
    kept.push_back(tensor(shape));
    const float* from = value.GetTensorData<float>();
    float* to = kept.back().GetTensorMutableData<float>();
    for (const std::int32_t sentence : sentences) {
      std::memcpy(to, from + static_cast<std::size_t>(sentence) * size, size * sizeof(float));
      to += size;
    }
  }
  return kept;
}

std::vector<std::vector<float>> copies(const std::vector<Ort::Value>& values) {
  std::vector<std::vector<float>> found;
  for (const Ort::Value& value : values) {
    const float* const first = value.GetTensorData<float>();
    found.emplace_back(first, first + value.GetTensorTypeAndShapeInfo().GetElementCount());
  }
  return found;
}

bool all_in_order(const std::vector<std::int32_t>& sentences, std::size_t batch) {
  if (sentences.size() != batch) return false;
  for (std::size_t i = 0; i < batch; ++i) {
    if (sentences[i] != static_cast<std::int32_t>(i)) return false;
  }
  return true;
}

}  // namespace tformer
