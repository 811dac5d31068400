#include "bundle/contract.hpp"

namespace tformer {
namespace {

using Specs = std::vector<TensorSpec>;

void add(Specs& specs, const Specs& more) { specs.insert(specs.end(), more.begin(), more.end()); }

Specs caches(const std::string& kind, const Model& model) {
  Specs specs;
  for (const std::string& name : cache_names(kind, model)) {
    specs.push_back({name, "float32", {0, model.heads, 0, model.head_dim}});
  }
  return specs;
}

Specs listed(const Model& model, const Recipe& recipe) {
  Specs specs;
  if (recipe.integer_step()) {
    specs = {{"listed_rows", "int8", {model.d_model, 0}}, {"listed_scales", "float32", {0}}};
  } else {
    specs = {{"listed_rows", "float32", {model.d_model, 0}}};
  }
  if (model.output_bias) specs.push_back({"listed_bias", "float32", {0}});
  return specs;
}

Signature growing(const Model& model, const Recipe& recipe) {
  Signature step;
  step.inputs = {{"tokens", "int32", {0, 0}}, {"parents", "int32", {0, 0}}, {"position", "int32", {1}},
                 {"src_lengths", "int32", {0}}};
  add(step.inputs, caches("cross", model));
  add(step.inputs, caches("past", model));
  step.outputs = {{"top_ids", "int32", {0, 0, recipe.top_k}}, {"top_scores", "float32", {0, 0, recipe.top_k}},
                  {"log_probs", "float32", {0, 0, model.tgt_vocab}}};
  if (recipe.attention) step.outputs.push_back({"attention", "float32", {0, 0, 0}});
  add(step.outputs, caches("present", model));
  return step;
}

Signature in_place(const Model& model, const Recipe& recipe, bool own_positions, bool short_list) {
  Signature step;
  step.inputs = {{"tokens", "int32", {0, 0}}, {"position", "int32", {1}}};
  if (own_positions) step.inputs.push_back({"positions", "int32", {0, 0}});
  add(step.inputs, {{"written_by", "int32", {0, 0, 0}}, {"src_lengths", "int32", {0}}});
  add(step.inputs, caches("cross", model));
  add(step.inputs, caches("past", model));
  if (short_list) {
    step.inputs.push_back({"shortlist", "int32", {0}});
    add(step.inputs, listed(model, recipe));
    step.inputs.push_back({"listed_mask", "float32", {0, 1, 0}});
  }
  step.outputs = {{"top_ids", "int32", {0, recipe.top_k}}, {"top_scores", "float32", {0, recipe.top_k}},
                  {"log_probs", "float32", {0, short_list ? 0 : model.tgt_vocab}}};
  add(step.outputs, caches("present", model));
  return step;
}

Signature device_search(const Model& model, const Recipe& recipe) {
  Signature step;
  step.inputs = {{"tokens", "int32", {0, 0}},    {"positions", "int32", {0, 0}},
                 {"parents", "int32", {0, 0}},   {"values", "float32", {0, 0}},
                 {"end_id", "int32", {1}},       {"live_beams", "int32", {1}},
                 {"src_lengths", "int32", {0}}};
  add(step.inputs, caches("cross", model));
  add(step.inputs, caches("past", model));
  step.outputs = {{"top_ids", "int32", {0, recipe.top_k}}, {"top_scores", "float32", {0, recipe.top_k}},
                  {"log_probs", "float32", {0, model.tgt_vocab}}, {"next_tokens", "int32", {0, 0}},
                  {"next_parents", "int32", {0, 0}}, {"next_values", "float32", {0, 0}},
                  {"next_positions", "int32", {0, 0}}};
  add(step.outputs, caches("present", model));
  return step;
}

}  // namespace

std::vector<std::string> cache_names(const std::string& kind, const Model& model) {
  std::vector<std::string> names;
  for (std::int64_t layer = 0; layer < model.decoder_layers; ++layer) {
    for (const char* part : {"k", "v"}) names.push_back(kind + "_" + part + "_" + std::to_string(layer));
  }
  return names;
}

std::vector<std::string> graphs_of(const Recipe& recipe) {
  if (recipe.target != "ort-cpu") return {"encoder", "decoder_step"};
  return {"encoder", "decoder_step", "slots_step", "short_rows", "short_step"};
}

std::string file_of(const std::string& graph, const Recipe& recipe) {
  return recipe.target == "native" ? "program.json" : graph + ".onnx";
}

std::string kind_of(const std::string& graph, const Recipe& recipe) {
  if (recipe.target == "native") return "native/1";
  if (graph == "encoder") return "encoder/1";
  if (graph == "slots_step") return "slots/1";
  if (graph == "short_rows") return "rows/1";
  if (graph == "short_step") return "short/1";
  if (recipe.target == "onnx") return "growing/1";
  return recipe.target == "ort-cpu" ? "inplace/1" : "device_search/1";
}

Signature signature(const std::string& graph, const Model& model, const Recipe& recipe) {
  if (graph == "encoder") {
    return {{{"src_ids", "int32", {0, 0}}, {"src_lengths", "int32", {0}}}, caches("cross", model)};
  }
  if (graph == "short_rows") return {{{"shortlist", "int32", {0}}}, listed(model, recipe)};
  if (recipe.target == "onnx") return growing(model, recipe);
  if (recipe.target == "trt") return device_search(model, recipe);
  const bool own_positions = graph == "slots_step" || recipe.target == "native";
  return in_place(model, recipe, own_positions, graph == "short_step");
}

}  // namespace tformer
