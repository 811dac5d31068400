// Engines over ONNX Runtime sessions, one class per kind of step.
#pragma once

#include <memory>

#include "engine.hpp"
#include "ort/graphs.hpp"

namespace tformer {

/// An engine for one thread; sessions are shared.
std::unique_ptr<Engine> make_engine(std::shared_ptr<const Graphs> graphs);

/// The engine of kind `growing/1`.
std::unique_ptr<Engine> make_growing(std::shared_ptr<const Graphs> graphs);

/// The engine of kinds `inplace/1`, `slots/1` and `short/1`.
std::unique_ptr<Engine> make_in_place(std::shared_ptr<const Graphs> graphs);

/// The encoder's outputs, 2L of (B, H, S, D).
std::vector<Ort::Value> encode(const Graphs& graphs, std::vector<std::int32_t>& src_ids,
                               std::vector<std::int32_t>& src_lengths);

/// Copies of the entries `sentences` of tensors (B, H, S, D), followed by `spare` entries of zeros, with S at least
/// `src_len`.
std::vector<Ort::Value> gathered(const std::vector<Ort::Value>& values, const std::vector<std::int32_t>& sentences,
                                 std::int64_t spare = 0, std::int64_t src_len = 0);

/// The values of tensors.
std::vector<std::vector<float>> copies(const std::vector<Ort::Value>& values);

/// Whether `sentences` is 0, 1, ... B - 1.
bool all_in_order(const std::vector<std::int32_t>& sentences, std::size_t batch);

}  // namespace tformer
