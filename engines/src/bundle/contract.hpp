// The graphs of a bundle: files, kinds and tensors, as contract.json states them. docs/bundle.md explains each kind.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bundle/files.hpp"
#include "engine.hpp"

namespace tformer {

/// The sizes of a bundle's network that a runtime needs.
struct Model : ModelInfo {
  std::int32_t bos_id = 0;
  std::int64_t d_model = 0;          ///< width of the decoder
  std::int64_t encoder_d_model = 0;  ///< width of the encoder's output
  std::int64_t heads = 0;     ///< of a decoder layer's caches
  std::int64_t head_dim = 0;  ///< width of one
  std::int64_t decoder_layers = 0;
  bool output_bias = false;
};

/// The fields of a variant's recipe that a runtime needs.
struct Recipe {
  std::string target;     ///< onnx, ort-cpu, trt or native
  std::string precision;  ///< of the weights: fp32, bf16, int8 or int4
  std::string cache_precision = "fp32";  ///< of keys and values: fp32, or in programs bf16
  std::int64_t group_size = 0;  ///< weights that share a scale; 0: a whole column
  std::int64_t top_k = 0;  ///< best tokens that a step returns a row; 0: as many as the search reads
  bool attention = false;  ///< steps return attention weights
  bool memory = false;     ///< a graph runs the encoder alone
  Limits limits;
  /// Whether a step multiplies 8-bit integers, with one scale per output.
  bool integer_step() const { return (precision == "int8" || precision == "int4") && group_size == 0; }
};

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

/// `<kind>_k_0`, `<kind>_v_0`, `<kind>_k_1` and so on: keys and values of every decoder layer.
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
