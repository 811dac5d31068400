// Plain C++, for every processor, and the reference that the other sets equal.
#include "kernels/portable_lanes.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {

const Kernels portable = table_of<PortableLanes>("portable");

}  // namespace tformer::kernels
