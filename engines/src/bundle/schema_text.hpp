// The text of the manifest's schema, which CMake puts into the library.
#pragma once

namespace tformer {
extern const char* const schema_text;
}  // namespace tformer
