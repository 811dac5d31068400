// AVX-512 with VNNI.
#include "kernels/avx512_lanes.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {

const Kernels avx512 = table_of<Avx512Lanes>("avx512");

}  // namespace tformer::kernels
