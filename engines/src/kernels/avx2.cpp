// AVX2 and FMA.
#include "kernels/avx2_lanes.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {

const Kernels avx2 = table_of<Avx2Lanes>("avx2");

}  // namespace tformer::kernels
