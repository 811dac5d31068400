// Validates JSON against a JSON Schema (draft 7); only the keywords that the schemas of bundles and plans use.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tformer {

/// What is wrong with a value; empty: nothing is.
std::string schema_error(const nlohmann::json& value, const nlohmann::json& schema);

/// The schema of a bundle's manifest, tformer_deploy/base/schemas/bundle.json. Throws std::logic_error if it uses a
/// keyword that is not implemented here.
const nlohmann::json& bundle_schema();

/// The schema of a folder of plans, tformer_deploy/base/schemas/plans.json. Throws as above.
const nlohmann::json& plans_schema();

}  // namespace tformer
