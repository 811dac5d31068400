#include "bundle/contract.hpp"

#include <map>
#include <stdexcept>

#include "bundle/schema_text.hpp"

namespace tformer {
namespace {

/// Whether a tensor or a graph exists.
bool exists(const Json& each, const Model& model, const Recipe& recipe) {
  const std::map<std::string, bool> options = {{"attention", recipe.attention},
                                               {"memory", recipe.memory},
                                               {"output_bias", model.output_bias},
                                               {"integer_step", recipe.integer_step()},
                                               {"float_step", !recipe.integer_step()},
                                               {"keys_values", !model.recurrent},
                                               {"states", model.recurrent}};
  return !each.contains("only") || options.at(each["only"]);
}

std::vector<TensorSpec> specs(const Json& tensors, const Model& model, const Recipe& recipe) {
  const std::map<std::string, std::int64_t> sizes = {
      {"d_model", model.d_model},   {"encoder_d_model", model.encoder_d_model}, {"heads", model.heads},
      {"head_dim", model.head_dim}, {"tgt_vocab", model.tgt_vocab},             {"best", recipe.top_k}};
  std::vector<TensorSpec> found;
  for (const Json& each : tensors) {
    if (!exists(each, model, recipe)) continue;
    std::vector<std::int64_t> shape;
    for (const Json& size : each["shape"]) {
      const auto known = size.is_string() ? sizes.find(size) : sizes.end();
      shape.push_back(size.is_number() ? size.get<std::int64_t>() : known == sizes.end() ? 0 : known->second);
    }
    const std::string name = each["name"];
    const bool per_layer = each.value("per_layer", false);
    for (const std::string& own : per_layer ? cache_names(name, model) : std::vector<std::string>{name}) {
      found.push_back({own, each["dtype"], shape});
    }
  }
  return found;
}

/// What the contract says of a graph of a target.
const Json& entry(const std::string& graph, const Recipe& recipe) {
  for (const Json& each : contract()["targets"][recipe.target]) {
    if (each["name"] == graph) return each;
  }
  throw std::logic_error("contract: target " + recipe.target + " has no graph " + graph);
}

}  // namespace

const Json& contract() {
  static const Json all = Json::parse(contract_text);
  return all;
}

std::vector<std::string> cache_names(const std::string& kind, const Model& model) {
  std::vector<std::string> names;
  for (std::int64_t layer = 0; layer < model.decoder_layers; ++layer) {
    if (model.recurrent && kind != "cross") {
      names.push_back(kind + "_c_" + std::to_string(layer));
      continue;
    }
    for (const char* part : {"k", "v"}) names.push_back(kind + "_" + part + "_" + std::to_string(layer));
  }
  return names;
}

std::vector<std::string> graphs_of(const Model& model, const Recipe& recipe) {
  std::vector<std::string> names;
  for (const Json& each : contract()["targets"][recipe.target]) {
    if (exists(each, model, recipe)) names.push_back(each["name"]);
  }
  return names;
}

std::string file_of(const std::string& graph, const Recipe& recipe) { return entry(graph, recipe)["file"]; }

std::string kind_of(const std::string& graph, const Recipe& recipe) { return entry(graph, recipe)["kind"]; }

Signature signature(const std::string& graph, const Model& model, const Recipe& recipe) {
  const Json& sides = contract()["tensors"][entry(graph, recipe)["tensors"].get<std::string>()];
  return {specs(sides["inputs"], model, recipe), specs(sides["outputs"], model, recipe)};
}

}  // namespace tformer
