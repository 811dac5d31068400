// NEON with products of 8-bit matrices: 2 rows and 8 inputs times 8 inputs and 2 outputs.
#include "kernels/neon_product.hpp"
#include "kernels/sets.hpp"
#include "kernels/table.hpp"

namespace tformer::kernels {
namespace {

struct MatrixProducts {
  static constexpr int rows = 4, int4_rows = 4, less = 0;
  static constexpr bool arranges = true;

  /// 8 inputs of outputs 0 and 1, and of outputs 2 and 3.
  struct Four {
    int8x16_t low, high;
  };
  /// Of 16 inputs (0 to 7: half 0) and 16 outputs (0 to 3: i = 0).
  static TFORMER_INLINE Four packed(const char* w, int half, int i) {
    const char* at = w + half * 128 + i * 16;
    return joined(load_signed(at), load_signed(at + 64));
  }
  static TFORMER_INLINE Four packed_nibbles(const char* w, int half, int i) {
    const uint8x16_t both = load_halves(w + half * 64 + i * 16);
    return joined(low_half(both), high_half(both));
  }
  static TFORMER_INLINE Four arranged(const char* w, int half, int i) {
    const char* at = w + half * 128 + i * 32;
    return {load_signed(at), load_signed(at + 16)};
  }
  template <Four (*get)(const char*, int, int)>
  static TFORMER_INLINE void arrange_by(const char* w, char* to) {
    TFORMER_UNROLL for (int i = 0; i < 8; ++i) {
      const Four four = get(w, i / 4, i % 4);
      vst1q_s8(reinterpret_cast<std::int8_t*>(to + i * 32), four.low);
      vst1q_s8(reinterpret_cast<std::int8_t*>(to + i * 32 + 16), four.high);
    }
  }
  static TFORMER_INLINE void arrange(const char* w, char* to) { arrange_by<packed>(w, to); }
  static TFORMER_INLINE void arrange_nibbles(const char* w, char* to) { arrange_by<packed_nibbles>(w, to); }

  /// Of a pair of rows and two outputs: row 0 times both, row 1 times both. An odd last row is its own partner.
  template <int R>
  struct Sums {
    static constexpr int pairs = (R + 1) / 2;
    int32x4_t sums[pairs][8];

    TFORMER_INLINE Sums() {
      TFORMER_UNROLL for (int i = 0; i < pairs * 8; ++i) sums[i / 8][i % 8] = vdupq_n_s32(0);
    }
    TFORMER_INLINE void add(const std::uint8_t* x, std::int64_t ld, const char* w) { add_by<packed>(x, ld, w); }
    TFORMER_INLINE void add_nibbles(const std::int8_t* x, std::int64_t ld, const char* w) {
      add_by<packed_nibbles>(x, ld, w);
    }
    template <class X>
    TFORMER_INLINE void add_arranged(const X* x, std::int64_t ld, const char* w) {
      add_by<arranged>(x, ld, w);
    }
    TFORMER_INLINE NeonLanes::I row(int r) const {
      const auto& of = sums[r / 2];
      if (r % 2 == 0) return {first(of[0], of[1]), first(of[2], of[3]), first(of[4], of[5]), first(of[6], of[7])};
      return {second(of[0], of[1]), second(of[2], of[3]), second(of[4], of[5]), second(of[6], of[7])};
    }

   private:
    template <Four (*get)(const char*, int, int), class X>
    TFORMER_INLINE void add_by(const X* x, std::int64_t ld, const char* w) {
      int8x16_t inputs[pairs][2];  // 0 to 7 of two rows, and 8 to 15
      TFORMER_UNROLL for (int p = 0; p < pairs; ++p) {
        const int64x2_t one = vreinterpretq_s64_s8(load_signed(x + 2 * p * ld));
        const int64x2_t two = 2 * p + 1 < R ? vreinterpretq_s64_s8(load_signed(x + (2 * p + 1) * ld)) : one;
        inputs[p][0] = vreinterpretq_s8_s64(vzip1q_s64(one, two));
        inputs[p][1] = vreinterpretq_s8_s64(vzip2q_s64(one, two));
      }
      TFORMER_UNROLL for (int half = 0; half < 2; ++half) {
        TFORMER_UNROLL for (int i = 0; i < 4; ++i) {
          const Four four = get(w, half, i);
          TFORMER_UNROLL for (int p = 0; p < pairs; ++p) {
            add_product(sums[p][2 * i], inputs[p][half], four.low, x);
            add_product(sums[p][2 * i + 1], inputs[p][half], four.high, x);
          }
        }
      }
    }
  };

 private:
  /// 4 inputs of 4 outputs, and 4 more inputs.
  static TFORMER_INLINE Four joined(int8x16_t x, int8x16_t y) {
    const int32x4_t first = vreinterpretq_s32_s8(x), second = vreinterpretq_s32_s8(y);
    return {vreinterpretq_s8_s32(vzip1q_s32(first, second)), vreinterpretq_s8_s32(vzip2q_s32(first, second))};
  }
  /// Inputs are signed or not, as the last argument.
  static TFORMER_INLINE void add_product(int32x4_t& sum, int8x16_t inputs, int8x16_t outputs, const std::uint8_t*) {
    sum = vusmmlaq_s32(sum, vreinterpretq_u8_s8(inputs), outputs);
  }
  static TFORMER_INLINE void add_product(int32x4_t& sum, int8x16_t inputs, int8x16_t outputs, const std::int8_t*) {
    sum = vmmlaq_s32(sum, inputs, outputs);
  }
  static TFORMER_INLINE int32x4_t first(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
  }
  static TFORMER_INLINE int32x4_t second(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
  }
};

void product_i8mm(const Product& work, const Piece& piece) {
  const Numbers numbers = work.matrix.numbers;
  // With fewer rows, dot products are as fast: no weights are arranged, no row is its own partner.
  const std::int64_t fewest = numbers == Numbers::int8 ? 2 : numbers == Numbers::int4 ? 4 : 0;
  if (piece.rows < fewest) return dotprod.product(work, piece);
  product_neon<MatrixProducts>(work, piece);
}

}  // namespace

const Kernels i8mm = table_of<NeonLanes, product_i8mm>("i8mm");

}  // namespace tformer::kernels
