// The engine for programs: the library's own kernels, no other runtime.
#pragma once

#include <memory>

#include "backend.hpp"

namespace tformer {

/// What runs a variant of target native. Throws Error.
std::shared_ptr<const Backend> open_program(std::shared_ptr<const Bundle> bundle, const OpenOptions& options);

}  // namespace tformer
