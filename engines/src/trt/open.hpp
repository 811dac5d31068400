// The way in to plans: the only header of this folder that others read, with or without TensorRT.
#pragma once

#include "backend.hpp"

namespace tformer {

/// The plans of a bundle that fit this host, for backend `trt`. Throws Error, always where the library was built
/// without TensorRT.
std::shared_ptr<const Backend> open_plans(std::shared_ptr<const Bundle> bundle, const OpenOptions& options);

}  // namespace tformer
