// `model` and `recipe` of a manifest: what is read of them, and whether they are those in a graph's metadata.
#pragma once

#include <cstdint>
#include <string>

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
  bool recurrent = false;  ///< decoder layers have a recurrent cell instead of self-attention
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

/// Parse and check `model`. Throws std::invalid_argument.
Model model_of(const Json& values);
/// Parse and check `recipe`. Throws std::invalid_argument.
Recipe recipe_of(const Json& values);

/// Whether two tables describe the same network; missing keys have their defaults.
bool same_model(const Json& one, const Json& other);
/// Whether two tables describe the same recipe; tolerances that one lacks are not compared.
bool same_recipe(const Json& one, const Json& other);

}  // namespace tformer
