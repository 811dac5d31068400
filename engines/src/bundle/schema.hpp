// JSON against a JSON Schema (draft 7), as much of it as the schemas of bundles and plans use.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tformer {

/// What is wrong with a value, or nothing. Throws std::logic_error for a schema with a keyword that is not known here.
std::string schema_error(const nlohmann::json& value, const nlohmann::json& schema);

/// The schema of a bundle's manifest, from tformer_deploy/schemas/bundle.json.
const nlohmann::json& bundle_schema();

/// The schema of a folder of plans, from tformer_deploy/schemas/plans.json.
const nlohmann::json& plans_schema();

}  // namespace tformer
