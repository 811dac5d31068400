// Plain C++ for every processor: the reference that the other sets equal bit by bit.
#include "kernels/portable_lanes.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {

const Kernels portable = table_of<PortableLanes>("portable");

}  // namespace tformer::kernels
