// The graphs of a bundle: files, kinds and tensors, as contract.json states them. docs/bundle.md explains each kind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bundle/files.hpp"
#include "bundle/model.hpp"

namespace tformer {

/// One input or output of a graph.
struct TensorSpec {
  std::string name;
  std::string dtype;                ///< int32, float32 or int8
  std::vector<std::int64_t> shape;  ///< 0: a size that a request says
};

/// Inputs and outputs of a graph, in order.
struct Signature {
  std::vector<TensorSpec> inputs, outputs;
};

/// `<kind>_k_0`, `<kind>_v_0`, `<kind>_k_1` and so on: keys and values of every decoder layer; `<kind>_c_0` and so on of
/// recurrent cells, but not where kind is cross.
std::vector<std::string> cache_names(const std::string& kind, const Model& model);

/// What make spec wrote from tformer_deploy/bundle/contract.py, embedded.
const Json& contract();

/// Names of all graphs of a variant.
std::vector<std::string> graphs_of(const Model& model, const Recipe& recipe);

/// The file of a graph of `graphs_of`.
std::string file_of(const std::string& graph, const Recipe& recipe);

/// The kind of a graph.
std::string kind_of(const std::string& graph, const Recipe& recipe);

/// What a graph of `graphs_of` takes and gives.
Signature signature(const std::string& graph, const Model& model, const Recipe& recipe);

}  // namespace tformer
