// The files of tformer_deploy/base/schemas that CMake embeds.
#pragma once

namespace tformer {
extern const char* const bundle_schema_text;
extern const char* const plans_schema_text;
extern const char* const model_text;
extern const char* const contract_text;
}  // namespace tformer
