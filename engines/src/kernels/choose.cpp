// Chooses an instruction set: those of this build that this machine has.
#include "kernels/sets.hpp"

#ifdef TFORMER_X86
#include <cpuid.h>
#endif

#ifdef TFORMER_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef TFORMER_ARM64
#ifdef __APPLE__
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif
#endif

namespace tformer::kernels {
namespace {

struct Set {
  const Kernels* kernels;
  const char* needs;
  bool (*there)();
};

#ifdef TFORMER_X86

/// What CPUID reports, and which registers the system saves between threads.
class Machine {
 public:
  Machine() {
    unsigned a = 0, b = 0, c = 0, d = 0, low = 0, high = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has(c, 27)) return;  // no xgetbv
    const bool fused = has(c, 12);
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    const unsigned more = __get_cpuid_count(7, 1, &a, &high, &high, &high) ? a : 0;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    const bool eight = (low & 6U) == 6, sixteen = (low & 0xE6U) == 0xE6;
    avx2 = eight && fused && has(b, 5);
    avxvnni = avx2 && has(more, 4);
    avx512 = avx2 && sixteen && has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31) && has(c, 11);  // F DQ BW VL VNNI
#ifdef TFORMER_EMULATED_TILES
    tiles = avx512;
#else
    tiles = avx512 && has(low, 17) && has(low, 18) && has(d, 24) && has(d, 25);
#endif
  }
  bool avx2 = false, avxvnni = false, avx512 = false, tiles = false;

 private:
  static bool has(unsigned word, unsigned bit) { return (word >> bit & 1U) != 0; }
};

const Machine& machine() {
  static const Machine found;
  return found;
}

#ifdef TFORMER_AMX

/// Asks the kernel for the tiles' memory, once for all threads. Only where AMX is chosen, or is the best: the kernel
/// then refuses smaller stacks for signals in the whole process. Source: Linux, Documentation/arch/x86/xstate.rst.
bool tiles_allowed() {
#ifdef TFORMER_EMULATED_TILES
  return true;
#else
  constexpr long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool allowed = syscall(SYS_arch_prctl, ask, tile_data) == 0;
  return allowed;
#endif
}

#endif

/// Best first.
const std::vector<Set>& sets() {
  static const std::vector<Set> all{
#ifdef TFORMER_AMX
                                    {&amx, "AMX for 8-bit integers, and the system's permission",
                                     [] { return machine().tiles && tiles_allowed(); }},
#endif
                                    {&avx512, "AVX-512 (F, BW, DQ, VL) with VNNI", [] { return machine().avx512; }},
                                    {&avxvnni, "AVX2, FMA and AVX-VNNI", [] { return machine().avxvnni; }},
                                    {&avx2, "AVX2 and FMA", [] { return machine().avx2; }},
                                    {&portable, "nothing", [] { return true; }}};
  return all;
}

#elif defined(TFORMER_ARM64)

#ifdef __APPLE__

/// Whether the system reports a feature. Source: Apple, "Determining instruction set characteristics".
bool reported(const char* name) {
  int found = 0;
  std::size_t size = sizeof found;
  return ::sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found != 0;
}

bool dotprod_there() { return reported("hw.optional.arm.FEAT_DotProd"); }
bool i8mm_there() { return dotprod_there() && reported("hw.optional.arm.FEAT_I8MM"); }

#else

/// Whether the system reports a feature. Source: Linux, Documentation/arch/arm64/elf_hwcaps.rst.
bool dotprod_there() { return (getauxval(AT_HWCAP) >> 20U & 1U) != 0; }                     // HWCAP_ASIMDDP
bool i8mm_there() { return dotprod_there() && (getauxval(AT_HWCAP2) >> 13U & 1U) != 0; }  // HWCAP2_I8MM

#endif

/// Best first.
const std::vector<Set>& sets() {
  static const std::vector<Set> all{{&i8mm, "products of 8-bit matrices (i8mm) and dot products", i8mm_there},
                                    {&dotprod, "dot products of 8-bit integers", dotprod_there},
                                    {&neon, "nothing", [] { return true; }},
                                    {&portable, "nothing", [] { return true; }}};
  return all;
}

#else

const std::vector<Set>& sets() {
  static const std::vector<Set> all{{&portable, "nothing", [] { return true; }}};
  return all;
}

#endif

}  // namespace

std::vector<std::string> names() {
  std::vector<std::string> found;
  for (const Set& set : sets()) found.emplace_back(set.kernels->name);
  return found;
}

const Kernels* named(const std::string& name) {
  for (const Set& set : sets()) {
    if (name == set.kernels->name) return set.there() ? set.kernels : nullptr;
  }
  return nullptr;
}

std::string refusal(const std::string& name) {
  std::string known;
  for (const Set& set : sets()) {
    if (name == set.kernels->name) {
      return set.there() ? "" : "kernels '" + name + "' need " + set.needs + ", which this machine does not have";
    }
    known += (known.empty() ? "" : ", ") + std::string(set.kernels->name);
  }
  return "there are no kernels '" + name + "', only " + known;
}

const Kernels& best() {
  for (const Set& set : sets()) {
    if (set.there()) return *set.kernels;
  }
  return portable;
}

}  // namespace tformer::kernels
