// NEON without dot products: products of 8 bits are made in 16, and added in 32.
#include "kernels/neon_product.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {
namespace {

struct WideProducts {
  static constexpr int rows = 2, int4_rows = 2, less = 128;
  static constexpr bool arranges = false;

  /// Four lanes for two outputs, as an instruction adds neighbours.
  template <int R>
  struct Sums {
    int32x4_t sums[R][8];

    TFORMER_INLINE Sums() {
      TFORMER_UNROLL for (int i = 0; i < 8 * R; ++i) sums[i / 8][i % 8] = vdupq_n_s32(0);
    }
    TFORMER_INLINE void add(const std::uint8_t* x, std::int64_t ld, const char* w) {
      int8x16_t inputs[R];
      TFORMER_UNROLL for (int r = 0; r < R; ++r) inputs[r] = load_less(x + r * ld);
      each<4>([&](auto j) TFORMER_LAMBDA {
        TFORMER_UNROLL for (int r = 0; r < R; ++r) {
          const int8x16_t x4 = quad<j.value>(inputs[r]);
          TFORMER_UNROLL for (int i = 0; i < 4; ++i) {
            const int8x16_t outputs = load_signed(w + j.value * 64 + i * 16);
            add_pairs(sums[r][2 * i], vmull_s8(vget_low_s8(outputs), vget_low_s8(x4)));
            add_pairs(sums[r][2 * i + 1], vmull_high_s8(outputs, x4));
          }
        }
      });
    }
    /// Four products of 4 by 8 bits are at most 7,620, which 16 bits hold.
    TFORMER_INLINE void add_nibbles(const std::int8_t* x, std::int64_t ld, const char* w) {
      TFORMER_UNROLL for (int r = 0; r < R; ++r) {
        const int8x16_t inputs = load_signed(x + r * ld);
        const int8x16_t x4[4] = {quad<0>(inputs), quad<1>(inputs), quad<2>(inputs), quad<3>(inputs)};
        TFORMER_UNROLL for (int i = 0; i < 4; ++i) {
          const uint8x16_t one = load_halves(w + i * 16), two = load_halves(w + 64 + i * 16);
          const int8x16_t y[4] = {low_half(one), high_half(one), low_half(two), high_half(two)};
          int16x8_t low = vmull_s8(vget_low_s8(y[0]), vget_low_s8(x4[0])), high = vmull_high_s8(y[0], x4[0]);
          TFORMER_UNROLL for (int j = 1; j < 4; ++j) {
            low = vmlal_s8(low, vget_low_s8(y[j]), vget_low_s8(x4[j]));
            high = vmlal_high_s8(high, y[j], x4[j]);
          }
          add_pairs(sums[r][2 * i], low);
          add_pairs(sums[r][2 * i + 1], high);
        }
      }
    }
    TFORMER_INLINE NeonLanes::I row(int r) const {
      const auto& of = sums[r];
      return {vpaddq_s32(of[0], of[1]), vpaddq_s32(of[2], of[3]), vpaddq_s32(of[4], of[5]), vpaddq_s32(of[6], of[7])};
    }
  };

 private:
  template <int j>
  static TFORMER_INLINE int8x16_t quad(int8x16_t inputs) {
    return vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(inputs), j));
  }
  static TFORMER_INLINE void add_pairs(int32x4_t& sum, int16x8_t products) { sum = vpadalq_s16(sum, products); }
};

}  // namespace

const Kernels neon = table_of<NeonLanes, product_neon<WideProducts>>("neon");

}  // namespace tformer::kernels
