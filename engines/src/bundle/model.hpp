// Reads `model` and `recipe` of a manifest, and compares them with those in a graph's metadata.
#pragma once

#include "bundle/contract.hpp"
#include "bundle/files.hpp"

namespace tformer {

/// Parse and check `model`. Throws std::invalid_argument.
Model model_of(const Json& values);
/// Parse and check `recipe`. Throws std::invalid_argument.
Recipe recipe_of(const Json& values);

/// Whether two tables describe the same network; missing keys have their defaults.
bool same_model(const Json& one, const Json& other);
/// Whether two tables describe the same recipe; tolerances that one lacks are not compared.
bool same_recipe(const Json& one, const Json& other);

}  // namespace tformer
