// NEON with dot products of four 8-bit integers.
#include "kernels/neon_product.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {
namespace {

struct DotProducts {
  static constexpr int rows = 4, int4_rows = 4, less = 128;
  static constexpr bool arranges = false;

  template <int R>
  struct Sums {
    static constexpr int chains = R == 1 ? 2 : 1;  // as each addition waits for the one before it
    int32x4_t sums[chains][R][4];

    TFORMER_INLINE Sums() {
      TFORMER_UNROLL for (int i = 0; i < chains * R * 4; ++i) sums[i / (R * 4)][i / 4 % R][i % 4] = vdupq_n_s32(0);
    }
    TFORMER_INLINE void add(const std::uint8_t* x, std::int64_t ld, const char* w) {
      int8x16_t inputs[R];
      TFORMER_UNROLL for (int r = 0; r < R; ++r) inputs[r] = load_less(x + r * ld);
      each<4>([&](auto j) TFORMER_LAMBDA {
        TFORMER_UNROLL for (int i = 0; i < 4; ++i) {
          const int8x16_t outputs = load_signed(w + j.value * 64 + i * 16);
          TFORMER_UNROLL for (int r = 0; r < R; ++r) dot<j.value>(sums[j.value % chains][r][i], outputs, inputs[r]);
        }
      });
    }
    TFORMER_INLINE void add_nibbles(const std::int8_t* x, std::int64_t ld, const char* w) {
      int8x16_t inputs[R];
      TFORMER_UNROLL for (int r = 0; r < R; ++r) inputs[r] = load_signed(x + r * ld);
      each<2>([&](auto j) TFORMER_LAMBDA {
        TFORMER_UNROLL for (int i = 0; i < 4; ++i) {
          const uint8x16_t both = load_halves(w + j.value * 64 + i * 16);
          const int8x16_t low = low_half(both), high = high_half(both);
          TFORMER_UNROLL for (int r = 0; r < R; ++r) {
            dot<2 * j.value>(sums[0][r][i], low, inputs[r]);
            dot<2 * j.value + 1>(sums[chains - 1][r][i], high, inputs[r]);
          }
        }
      });
    }
    TFORMER_INLINE NeonLanes::I row(int r) const {
      const auto& one = sums[0][r];
      const NeonLanes::I sum = {one[0], one[1], one[2], one[3]};
      if (chains == 1) return sum;
      const auto& two = sums[chains - 1][r];
      return NeonLanes::add_ints(sum, {two[0], two[1], two[2], two[3]});
    }
  };

 private:
  template <int j>
  static TFORMER_INLINE void dot(int32x4_t& sum, int8x16_t outputs, int8x16_t inputs) {
    sum = vdotq_laneq_s32(sum, outputs, inputs, j);
  }
};

}  // namespace

const Kernels dotprod = table_of<NeonLanes, product_neon<DotProducts>>("dotprod");

}  // namespace tformer::kernels
