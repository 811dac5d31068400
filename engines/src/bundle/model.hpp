// A manifest's `model` and `recipe`: checked, and compared with those that stand in a graph.
#pragma once

#include "bundle/contract.hpp"
#include "bundle/files.hpp"

namespace tformer {

/// Throws std::invalid_argument with the words of the Python package.
Model model_of(const Json& values);
/// Throws std::invalid_argument.
Recipe recipe_of(const Json& values);

/// Whether two tables are the same network; keys that one lacks have their defaults.
bool same_model(const Json& one, const Json& other);
/// Whether two tables are the same recipe; limits of `tformer check` that one lacks are not compared.
bool same_recipe(const Json& one, const Json& other);

}  // namespace tformer
