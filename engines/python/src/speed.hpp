// What the kernels of this machine multiply at most, for the limits that `tformer bench` compares with.
#pragma once

#include <string>

namespace tformer::python {

/// Operations a second (a multiplication and an addition are two) of products of `numbers`, fp32 or int8, whose arrays
/// stay in a core's cache, on so many threads. Throws Error for other numbers.
double product_rate(const std::string& numbers, int threads);

}  // namespace tformer::python
