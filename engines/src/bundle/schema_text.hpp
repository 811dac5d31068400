// The texts of schemas, which CMake puts into the library.
#pragma once

namespace tformer {
extern const char* const bundle_schema_text;
extern const char* const plans_schema_text;
extern const char* const model_spec_text;
}  // namespace tformer
