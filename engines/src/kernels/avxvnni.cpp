// AVX2 and FMA with AVX-VNNI.
#include "kernels/avx2_lanes.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {

const Kernels avxvnni = table_of<AvxVnniLanes>("avxvnni");

}  // namespace tformer::kernels
