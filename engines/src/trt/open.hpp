// Opens plans: the only header of this folder that the rest of the library includes, with or without TensorRT.
#pragma once

#include <string>

#include "backend.hpp"

namespace tformer {

/// The plans of a bundle that run on this host, for backend `trt`. Throws Error, always where the library was built
/// without TensorRT.
std::shared_ptr<const Backend> open_plans(std::shared_ptr<const Bundle> bundle, const OpenOptions& options);

/// The version of the TensorRT headers that the library was built with, such as 11.1.0; empty: without TensorRT.
std::string tensorrt_headers();

}  // namespace tformer
