// NEON with products of 8-bit matrices: 2 rows and 8 inputs times 8 inputs and 2 outputs.
#include "kernels/neon_product.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {
namespace {

struct MatrixProducts {
  static constexpr int rows = 6, int4_rows = 4, less = 0;

  /// Of a pair of rows and two outputs: row 0 times both, row 1 times both. An odd last row is its own partner.
  template <int R>
  struct Sums {
    static constexpr int pairs = (R + 1) / 2;
    int32x4_t sums[pairs][8];

    TFORMER_INLINE Sums() {
      TFORMER_UNROLL for (int i = 0; i < pairs * 8; ++i) sums[i / 8][i % 8] = vdupq_n_s32(0);
    }
    TFORMER_INLINE void add(const std::uint8_t* x, std::int64_t ld, const char* w) {
      uint8x16_t inputs[pairs][2];
      load_pairs(reinterpret_cast<const std::int8_t*>(x), ld, inputs);
      TFORMER_UNROLL for (int half = 0; half < 2; ++half) {
        TFORMER_UNROLL for (int i = 0; i < 4; ++i) {
          const int8x16_t one = load_signed(w + half * 128 + i * 16), two = load_signed(w + half * 128 + 64 + i * 16);
          const int8x16_t low = lower(one, two), high = upper(one, two);
          TFORMER_UNROLL for (int p = 0; p < pairs; ++p) {
            sums[p][2 * i] = vusmmlaq_s32(sums[p][2 * i], inputs[p][half], low);
            sums[p][2 * i + 1] = vusmmlaq_s32(sums[p][2 * i + 1], inputs[p][half], high);
          }
        }
      }
    }
    TFORMER_INLINE void add_nibbles(const std::int8_t* x, std::int64_t ld, const char* w) {
      uint8x16_t inputs[pairs][2];
      load_pairs(x, ld, inputs);
      TFORMER_UNROLL for (int half = 0; half < 2; ++half) {
        TFORMER_UNROLL for (int i = 0; i < 4; ++i) {
          const uint8x16_t both = load_halves(w + half * 64 + i * 16);
          const int8x16_t one = low_half(both), two = high_half(both);
          const int8x16_t low = lower(one, two), high = upper(one, two);
          TFORMER_UNROLL for (int p = 0; p < pairs; ++p) {
            const int8x16_t rows = vreinterpretq_s8_u8(inputs[p][half]);
            sums[p][2 * i] = vmmlaq_s32(sums[p][2 * i], rows, low);
            sums[p][2 * i + 1] = vmmlaq_s32(sums[p][2 * i + 1], rows, high);
          }
        }
      }
    }
    TFORMER_INLINE NeonLanes::I row(int r) const {
      const auto& of = sums[r / 2];
      if (r % 2 == 0) return {first(of[0], of[1]), first(of[2], of[3]), first(of[4], of[5]), first(of[6], of[7])};
      return {second(of[0], of[1]), second(of[2], of[3]), second(of[4], of[5]), second(of[6], of[7])};
    }

   private:
    /// Inputs 0 to 7 of two rows, and inputs 8 to 15.
    static TFORMER_INLINE void load_pairs(const std::int8_t* x, std::int64_t ld, uint8x16_t (&to)[pairs][2]) {
      TFORMER_UNROLL for (int p = 0; p < pairs; ++p) {
        const int64x2_t one = vreinterpretq_s64_s8(vld1q_s8(x + 2 * p * ld));
        const int64x2_t two = 2 * p + 1 < R ? vreinterpretq_s64_s8(vld1q_s8(x + (2 * p + 1) * ld)) : one;
        to[p][0] = vreinterpretq_u8_s64(vzip1q_s64(one, two));
        to[p][1] = vreinterpretq_u8_s64(vzip2q_s64(one, two));
      }
    }
  };

 private:
  /// 4 inputs of 4 outputs, and 4 more inputs: 8 inputs of outputs 0 and 1, and of 2 and 3.
  static TFORMER_INLINE int8x16_t lower(int8x16_t x, int8x16_t y) {
    return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(x), vreinterpretq_s32_s8(y)));
  }
  static TFORMER_INLINE int8x16_t upper(int8x16_t x, int8x16_t y) {
    return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(x), vreinterpretq_s32_s8(y)));
  }
  static TFORMER_INLINE int32x4_t first(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
  }
  static TFORMER_INLINE int32x4_t second(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
  }
};

void product_i8mm(const Product& work, const Piece& piece) {
  const bool integers = work.matrix.numbers == Numbers::int8 || work.matrix.numbers == Numbers::int4;
  if (integers && piece.rows == 1) return dotprod.product(work, piece);  // half of each product would be thrown away
  product_neon<MatrixProducts>(work, piece);
}

}  // namespace

const Kernels i8mm = table_of<NeonLanes, product_i8mm>("i8mm");

}  // namespace tformer::kernels
