// The tables of this build, one file each.
#pragma once

#include "kernels/kernels.hpp"

namespace tformer::kernels {

extern const Kernels portable;

}  // namespace tformer::kernels
