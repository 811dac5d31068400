// The kernel tables of this build, one file each.
#pragma once

#include "kernels/kernels.hpp"

namespace tformer::kernels {

#ifdef TFORMER_X86
extern const Kernels amx, avx512, avx2, avxvnni;
#endif
#ifdef TFORMER_ARM64
extern const Kernels i8mm, dotprod, neon;
#endif
extern const Kernels portable;

}  // namespace tformer::kernels
