// What one core of this machine reads from memory and multiplies at most: what times are shown beside.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

#include "kernels/kernels.hpp"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

template <class T>
struct Free {
  void operator()(T* p) const { std::free(p); }
};
template <class T>
using Memory = std::unique_ptr<T, Free<T>>;

template <class T>
Memory<T> memory(std::int64_t count, T value = T()) {
  const auto bytes = static_cast<std::size_t>(tformer::kernels::padded(count * static_cast<std::int64_t>(sizeof(T)), 4096));
  Memory<T> made(static_cast<T*>(std::aligned_alloc(4096, bytes)));
  std::fill_n(made.get(), count, value);
  return made;
}

double bandwidth = 0;  // bytes a second
double peak = 0;       // products of 8-bit integers a second

#ifdef __x86_64__
__attribute__((target("avx2"))) double read_all(const char* p, std::int64_t count) {
  __m256i sum[4] = {};
  const double start = now();
  for (std::int64_t i = 0; i < count; i += 128) {
    for (int j = 0; j < 4; ++j) {
      _mm_prefetch(p + i + 4096 + j * 32, _MM_HINT_T0);
      sum[j] = _mm256_xor_si256(sum[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + j * 32)));
    }
  }
  const double taken = now() - start;
  for (const __m256i& each : sum) __asm__ volatile("" : : "x"(each));
  return taken;
}

/// As 16-bit integers.
__attribute__((target("avx2"))) double avx2_peak() {
  __m256i sums[12] = {}, x = _mm256_set1_epi16(1);
  double best = 1e9;
  for (int round = 0; round < 30; ++round) {
    const double start = now();
    for (int i = 0; i < 20000; ++i) {
#pragma GCC unroll 12
      for (__m256i& sum : sums) {
        __asm__ volatile("" : "+x"(x));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, x));
      }
    }
    best = std::min(best, now() - start);
  }
  for (const __m256i& sum : sums) __asm__ volatile("" : : "x"(sum));
  return 20000.0 * 12 * 16 / best;
}

__attribute__((target("avx512f,avx512vnni"))) double vnni_peak() {
  __m512i sums[12] = {}, x = _mm512_set1_epi8(1);
  double best = 1e9;
  for (int round = 0; round < 30; ++round) {
    const double start = now();
    for (int i = 0; i < 20000; ++i) {
#pragma GCC unroll 12
      for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, x, x);
    }
    best = std::min(best, now() - start);
  }
  for (const __m512i& sum : sums) __asm__ volatile("" : : "v"(sum));
  return 20000.0 * 12 * 64 / best;
}

__attribute__((target("amx-tile,amx-int8"))) double amx_peak() {
  alignas(64) static std::uint8_t configuration[64] = {1};
  alignas(64) static char data[2][1024];
  for (int i = 0; i < 8; ++i) configuration[16 + 2 * i] = 64, configuration[48 + i] = 16;
  __asm__ volatile("" : : "r"(configuration) : "memory");
  _tile_loadconfig(configuration);
  _tile_loadd(4, data[0], 64);
  _tile_loadd(6, data[1], 64);
  double best = 1e9;
  for (int round = 0; round < 30; ++round) {
    const double start = now();
    for (int i = 0; i < 20000; ++i) {
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 6);
      _tile_dpbusd(2, 4, 6);
      _tile_dpbusd(3, 4, 6);
    }
    best = std::min(best, now() - start);
  }
  _tile_release();
  return 20000.0 * 4 * 16384 / best;
}

void measure_machine(const std::string& set) {
  const std::int64_t count = std::int64_t(48) << 20;
  const auto data = memory<char>(count + 8192, 1);
  double best = 1e9;
  for (int i = 0; i < 30; ++i) best = std::min(best, read_all(data.get(), count));
  bandwidth = static_cast<double>(count) / best;
  peak = set == "amx" ? amx_peak() : set == "avx512" ? vnni_peak() : set == "avx2" ? avx2_peak() : 0;
}
#else
void measure_machine(const std::string&) {}
#endif

}  // namespace
