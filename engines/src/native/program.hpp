// The instructions of a variant of target native: program.json, checked to the last index, and its weights.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "bundle/content.hpp"
#include "kernels/kernels.hpp"

namespace tformer::native {

enum class Op { embed, norm, round, matmul, activate, add, multiply, self, recur, cross, keep, output, give };

/// Columns of a value. A value of -1: none.
struct View {
  std::int32_t value = -1;
  std::int64_t first = 0, width = 0;
  explicit operator bool() const { return value >= 0; }
};

/// One thing that is done for all rows. What is absent is null, or a view of no value.
struct Instruction {
  Op op = Op::add;
  View x, y, gate, residual, q, k, v;
  std::int32_t out = -1;      // the value that gets the numbers
  std::int32_t rounded = -1;  // the value that gets them in 8 bits
  std::int64_t width = 0;     // of what it writes
  kernels::Rounding rounding;  // of `rounded`
  kernels::Matrix matrix;      // with the product's bias
  float step = 1;         // of the 8 bits that an int8 product reads
  std::int32_t zero = 0;
  const float *bias = nullptr, *gain = nullptr;
  const void* table = nullptr;     // (rows, width) of embeddings: fp32, or int8 with `scales` of each row
  const float* scales = nullptr;
  const float* positions = nullptr;  // (positions, width)
  float factor = 1;                  // of the table's rows
  kernels::Norm norm = kernels::Norm::layer;
  float eps = 0;
  kernels::Activation activation = kernels::Activation::none;
  std::int64_t heads = 1, size = 0, layer = -1;  // heads: a norm has one of its own for each
  float scale = 1;               // of scores
  std::int64_t bias_stride = 0;  // of an attention's bias, from a head to the next; `bias` is that of distance 0
};

/// One graph.
struct Code {
  std::vector<std::int64_t> widths;  // of every value
  std::vector<bool> bytes;           // whether a value has 8 bits
  std::vector<Instruction> instructions;
};

class Program {
 public:
  /// The program of a variant. Throws Error.
  Program(const Bundle& bundle, const std::string& variant);
  /// Of what `program.json` holds, and the weights beside it, which are copied unless they begin at a multiple of 64. Throws Error, and std::invalid_argument for what is
  /// no program of such a model.
  Program(const Json& program, const Content& weights, const Model& model, const Recipe& recipe);

  const Code& encoder() const { return encoder_; }
  const Code& step() const { return step_; }
  /// The encoder's own output; no instructions where the variant was exported without it.
  const Code& memory() const { return memory_; }

 private:
  Content weights_;
  Code encoder_, step_, memory_;
};

}  // namespace tformer::native
