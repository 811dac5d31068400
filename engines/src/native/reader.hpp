// One graph of a program.json as instructions.
#pragma once

#include "native/program.hpp"

namespace tformer::native {

enum class Graph { encoder, memory, step };

/// A graph's instructions. Every number is checked before it is used; what is wrong is std::invalid_argument.
Code read_code(const Json& program, const Json& graph, Graph kind, const Content& weights, const Model& model,
               const Recipe& recipe);

}  // namespace tformer::native
