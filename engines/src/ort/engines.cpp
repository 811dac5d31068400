#include "ort/engines.hpp"

#include <algorithm>
#include <cstring>

#include "errors.hpp"

namespace tformer {

std::unique_ptr<Engine> make_engine(std::shared_ptr<const Graphs> graphs) {
  return graphs->recipe().target == "onnx" ? make_growing(std::move(graphs)) : make_in_place(std::move(graphs));
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
  for (std::size_t i = 0; i < names.size(); ++i) {  // ONNX Runtime does not check that output sizes match the inputs
    const std::vector<std::int64_t> found = cross[i].GetTensorTypeAndShapeInfo().GetShape();
    if (found == wanted) continue;
    throw Error(Status::bundle, graphs.bundle().graph("encoder", graphs.variant()).string() + ": it gave '" + names[i] +
                                    "' of " + shown(found) + ", not of " + shown(wanted) +
                                    ": export the bundle again");
  }
  return cross;
}

std::vector<Ort::Value> gathered(const std::vector<Ort::Value>& values, const std::vector<std::int32_t>& sentences,
                                 std::int64_t spare, std::int64_t src_len) {
  std::vector<Ort::Value> kept;
  for (const Ort::Value& value : values) {
    std::vector<std::int64_t> shape = value.GetTensorTypeAndShapeInfo().GetShape();
    const auto heads = static_cast<std::size_t>(shape[1]), own = static_cast<std::size_t>(shape[2] * shape[3]);
    shape[0] = static_cast<std::int64_t>(sentences.size()) + spare;
    shape[2] = std::max(shape[2], src_len);
    const auto wide = static_cast<std::size_t>(shape[2] * shape[3]);
    kept.push_back(tensor(shape));
    const float* const from = value.GetTensorData<float>();
    float* to = kept.back().GetTensorMutableData<float>();
    for (const std::int32_t sentence : sentences) {
      for (std::size_t head = 0; head < heads; ++head, to += wide) {
        std::copy_n(from + (static_cast<std::size_t>(sentence) * heads + head) * own, own, to);
        std::fill(to + own, to + wide, 0.0F);
      }
    }
    std::fill_n(to, static_cast<std::size_t>(spare) * heads * wide, 0.0F);
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
