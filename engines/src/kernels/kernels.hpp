// The arithmetic of the CPU engine: one table of functions for each instruction set.
//
// All tables give the same bits, so that scores depend neither on the batch, nor on threads, nor on the processor:
// - A matrix product adds the products of one output from input 0 upwards, one fused multiply-add each. Sums of 8-bit
//   integers are exact. int4: the exact sum of each group, times both scales, is added from group 0 upwards.
// - Sums over a row lie in 16 lanes, element i in lane i % 16, added upwards (fused where they are of products); then
//   lane i and i + 8 are added, i and i + 4, i + 2, i + 1.
// - Attention: see `SelfAttention` and `SharedAttention`.
// - exp, log and erf are polynomials of our own (mathematics.hpp), of fused multiply-adds.
// bf16 weights are widened to fp32: the processor's own products of bf16 round otherwise on each processor. So are keys
// and values in bf16, which are rounded once, where they are written; see `Bf16`.
//
// Every function works on a piece of its result, so that threads can share the work; none allocates memory.
// Rows may lie anywhere; those of a product are faster if they are not a large power of two apart, as a core's cache holds
// few lines at such distances: 64 bytes more are enough. Where a kernel may read past the last element, its comment
// says so.
// Pointers of packed arrays (weights, scales, sums, bias of products) are aligned to 64 bytes.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace tformer::kernels {

/// Floats per SIMD operation; packed arrays are padded to a multiple of it.
constexpr std::int64_t lanes = 16;

static constexpr inline std::int64_t padded(std::int64_t count, std::int64_t to = lanes) {
  return (count + to - 1) / to * to;
}

// ---- rounding to 8 bits

/// QuantizeLinear: round half to even of x * shrink / step, plus `zero`, within 0 and `most`. NaN becomes 0.
/// x is multiplied by shrink * (1 / step) in fp32: where x / step is all but half way between two integers, the result
/// may be the other one.
struct Rounding {
  float step = 1;
  std::int32_t zero = 0;
  const float* shrink = nullptr;  ///< (width), above 0: each channel is multiplied by it first; null: by nothing
  std::int32_t most = 255;
};

/// Destination of rows: fp32, 8 bits, or both. `ld`: elements from one row to the next.
struct Target {
  float* floats = nullptr;
  std::int64_t ld = 0;
  std::uint8_t* bytes = nullptr;
  std::int64_t bytes_ld = 0;
  Rounding rounding;  ///< of `bytes`
};

enum class Activation { none, relu, gelu, gelu_tanh, gelu_sigmoid, silu };

/// The epilogue applied to values y before they are stored: activation(y) * gate + residual.
struct Finish {
  Activation activation = Activation::none;
  const float* gate = nullptr;  ///< (rows, width)
  std::int64_t gate_ld = 0;
  const float* residual = nullptr;  ///< (rows, width); may be the destination
  std::int64_t residual_ld = 0;
  Target to;
};

/// Rows of elementwise work: finish(x).
struct Elementwise {
  const float* x = nullptr;
  std::int64_t ld = 0, width = 0;
  Finish finish;
};

/// Rows in 8 bits with a scale for each group of inputs: what int4 products read.
/// As MatMulNBits with accuracy_level 4: the scale is the largest magnitude / 127.
/// A NaN counts as the smallest integer, and not for the scale.
struct Groups {
  const float* x = nullptr;
  std::int64_t ld = 0, width = 0, group = 0;  ///< group: 16, 32, 64, 128 or 256
  std::int8_t* integers = nullptr;            ///< (rows, padded(width, group)), zeros behind the width
  float* scales = nullptr;                    ///< (rows, groups)
  std::int32_t* sums = nullptr;               ///< (rows, groups) of the integers
};

// ---- products

enum class Numbers { fp32, bf16, int8, int4 };

/// Weights (outputs, inputs) as tformer_deploy/export/packing.py packs them: panels of 16 outputs, the last one padded
/// with zeros, as are scales, sums and bias.
/// fp32 [panels][K][16] · bf16 [panels][K/2][16][2], K padded to 2 · int8 [panels][K/4][16][4], K padded to 64 ·
/// int4 [panels][K/8][16][4], K padded to whole groups: the low half of a byte is input k, the high half k + 4, 8 is 0.
struct Matrix {
  Numbers numbers = Numbers::fp32;
  std::int64_t inputs = 0, outputs = 0;
  std::int64_t group = 0;  ///< int4: inputs per scale
  const void* weights = nullptr;
  const float* scales = nullptr;       ///< int8: (outputs); int4: [panels][groups][16]
  const std::int32_t* sums = nullptr;  ///< int8: (outputs) of each output's weights
  const float* bias = nullptr;         ///< (outputs); null: none
};

static constexpr inline std::int64_t panels_of(const Matrix& matrix) { return padded(matrix.outputs) / lanes; }

/// Bytes of a panel.
static constexpr inline std::int64_t panel_bytes(const Matrix& matrix) {
  switch (matrix.numbers) {
    case Numbers::fp32: return matrix.inputs * 4 * lanes;
    case Numbers::bf16: return padded(matrix.inputs, 2) * 2 * lanes;
    case Numbers::int8: return padded(matrix.inputs, 64) * lanes;
    case Numbers::int4: break;
  }
  return padded(matrix.inputs, matrix.group) * lanes / 2;
}

/// Rows that a product reads. `ld`: elements from one row to the next.
struct Input {
  const float* floats = nullptr;  ///< fp32 and bf16
  /// int8: u8, of which padded(inputs, 64) are read, those past the inputs times zero; of a piece, rows up to a
  /// multiple of 16 counted from its first may be read. int4: the integers of `Groups`.
  const void* integers = nullptr;
  std::int64_t ld = 0;
  float step = 1;          ///< int8: as in `Rounding`
  std::int32_t zero = 0;   ///< int8: as in `Rounding`
  const float* scales = nullptr;        ///< int4: of `Groups`
  const std::int32_t* sums = nullptr;   ///< int4: of `Groups`
};

/// Rows [row, row + rows) times panels [panel, panel + panels).
struct Piece {
  std::int64_t row = 0, rows = 0, panel = 0, panels = 0;
};

/// finish(x * weights^T + bias)
struct Product {
  Matrix matrix;
  Input x;
  Finish finish;
};

// ---- rows

enum class Norm { layer, rms, annotated };

/// Normalization of rows of x. The result may overwrite the source.
struct Normed {
  Norm norm = Norm::layer;
  float eps = 0;
  const float* gain = nullptr;  ///< (width)
  const float* bias = nullptr;  ///< (width); null: none
  const float* x = nullptr;
  std::int64_t ld = 0, width = 0;
  Target to;
};

/// Embedding: row of the table * scale + position.
struct Embedding {
  const std::int32_t* ids = nullptr;  ///< (rows)
  std::int64_t width = 0;
  const float* floats = nullptr;         ///< (vocabulary, width), or
  const std::int8_t* integers = nullptr; ///< (vocabulary, width) with
  const float* scales = nullptr;         ///< (vocabulary), which hold what rows are multiplied by
  float scale = 1;                       ///< factor of the rows of `floats`
  const float* positions = nullptr;      ///< (positions, width); null: none
  const std::int32_t* places = nullptr;  ///< (rows) the position of each row
  float* out = nullptr;
  std::int64_t ld = 0;
};

/// One row of an SSRU cell: state = f * past + (1 - f) * x with f = sigmoid(forget), out = max(0, state).
struct Recurrence {
  const float *forget = nullptr, *x = nullptr;  ///< (width)
  const float* past = nullptr;                  ///< (width); null: zeros
  float *state = nullptr, *out = nullptr;       ///< (width)
  std::int64_t width = 0;
};

// ---- attention

/// bf16: fp32 rounded to its upper 16 bits, half to even. NaN stays NaN.
struct Bf16 {
  std::uint16_t bits;
};

/// Widened to fp32, exactly.
static inline float widened(Bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16U;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

/// Self-attention of one new position of every row over its cache.
/// The cache of row i is slot i: for each head [position][padded(size)], zeros past the size. The kernel writes
/// the new position, and reads it back as rounded. Score = fma(q·k, scale, bias); q·k and softmax are sums over a row.
/// Values: position t is added to chain t % 4, then chains 0 and 2, 1 and 3, and both are added, times 1 / sum.
struct SelfAttention {
  std::int64_t heads = 0, size = 0;
  float scale = 1;
  const float *q = nullptr, *k = nullptr, *v = nullptr;  ///< (rows, heads * size)
  std::int64_t ld = 0;
  Numbers cached = Numbers::fp32;             ///< type of keys and values: fp32 or bf16
  void *keys = nullptr, *values = nullptr;    ///< of slot 0, head 0
  std::int64_t slot_stride = 0;               ///< elements from one slot to the next
  std::int64_t head_stride = 0;               ///< elements from one head to the next
  const std::int32_t* positions = nullptr;    ///< (rows) positions of each row before the new one
  const std::int32_t* written_by = nullptr;   ///< (rows, written_ld) the slot that holds each position; null: its own
  std::int64_t written_ld = 0;
  const float* bias = nullptr;       ///< head 0, distance 0; key t, query p: bias[t - p]; reads up to 16 past the end
  std::int64_t bias_stride = 0;      ///< floats from one head to the next
  std::int64_t ahead = 0;            ///< elements to the keys and values of the next call, to prefetch; 0: not known
  Target to;                         ///< (rows, heads * size)
};

/// How `pack_source` packs keys and values (length, heads * size) for `SharedAttention`.
/// For each head, keys [ceil(length / 16)][size][16 positions], values [length][padded(size)]; zeros at padding.
/// A last block of at most 8 positions is [size][8], see `key_lanes`.
struct Source {
  std::int64_t heads = 0, size = 0, length = 0;
  const float *k = nullptr, *v = nullptr;
  std::int64_t k_ld = 0, v_ld = 0;
  Numbers cached = Numbers::fp32;  ///< type to pack to: fp32 or bf16
  void *keys = nullptr, *values = nullptr;
  std::int64_t head_stride = 0;  ///< elements from one head to the next: at least source_size(length, size)
};

/// Elements of one head's keys, which are as many as of its values.
static constexpr inline std::int64_t source_size(std::int64_t length, std::int64_t size) {
  return padded(length) * padded(size);
}

/// Positions side by side in the key block of position t.
static constexpr inline std::int64_t key_lanes(std::int64_t length, std::int64_t t) {
  const std::int64_t left = length - t / lanes * lanes;
  return left > lanes / 2 ? lanes : lanes / 2;
}

/// Attention of queries that share keys and values: cross-attention of a sentence's beams, or encoder self-attention.
/// `chains`: 4 for few queries (a product d of q·k is added to chain d % 4, position t of the values to chain t % 4,
/// chains 0 and 2, 1 and 3, then both are added), 1 for many (from 0 upwards). Score = fma(q·k, scale, bias).
struct SharedAttention {
  std::int64_t heads = 0, size = 0, length = 0;  ///< length: real positions, at least 1
  float scale = 1;
  int chains = 4;
  const float* q = nullptr;  ///< (queries, heads * size)
  std::int64_t ld = 0;
  Numbers cached = Numbers::fp32;                 ///< type of keys and values: fp32 or bf16
  const void *keys = nullptr, *values = nullptr;  ///< see `Source`
  std::int64_t head_stride = 0;
  const float* bias = nullptr;  ///< head 0, distance 0; key t of query i gets bias[t - i]; reads up to 16 past the end
  std::int64_t bias_stride = 0;
  std::int64_t ahead = 0;       ///< elements to the keys and values of the next call, to prefetch; 0: none
  float* weights = nullptr;     ///< (queries, heads, weights_ld): destination of the softmax; null: not stored
  std::int64_t weights_ld = 0;  ///< at least padded(length)
  Target to;                    ///< (queries, heads * size)
};

/// Queries (or rows) [row, row + rows), heads [head, head + heads).
struct Heads {
  std::int64_t row = 0, rows = 0, head = 0, heads = 0;
};

/// The largest size of a head.
constexpr std::int64_t largest_head = 256;

/// Floats of scratch memory per thread, for attention over so many positions.
static constexpr inline std::int64_t attention_scratch(std::int64_t length) { return 8 * padded(length) + 8 * largest_head; }

// ---- output

/// Outputs per block, for maxima and sums: the same for any number of threads.
constexpr std::int64_t block_outputs = 256;

/// The output layer: logits block by block, each block's maximum and sum, and the best tokens so far.
struct Output {
  Matrix matrix;  ///< weights are not read if `given` is set
  Input x;
  const float* given = nullptr;  ///< (rows, given_ld) logits that are already computed; may be `logits`
  std::int64_t given_ld = 0;
  std::int64_t best = 0;     ///< tokens to return per row
  float* logits = nullptr;   ///< (rows, logits_ld), null: not stored; `finish_output` turns them into log-probabilities
  std::int64_t logits_ld = 0;
  float* largest = nullptr;  ///< (rows, blocks)
  float* sums = nullptr;     ///< (rows, blocks) of exp(logit - largest)
  float* best_logits = nullptr;       ///< (threads, rows, best): `start_output` first
  std::int32_t* best_ids = nullptr;   ///< (threads, rows, best)
  std::int64_t rows = 0;
};

static constexpr inline std::int64_t blocks_of(const Matrix& matrix) {
  return (matrix.outputs + block_outputs - 1) / block_outputs;
}

/// Rows times blocks, done by one thread.
struct OutputPiece {
  std::int64_t row = 0, rows = 0, block = 0, blocks = 0, thread = 0;
};

/// The best tokens of rows [row, row + rows), merged over threads: best first, ties by the lower id.
struct Best {
  std::int64_t row = 0, rows = 0, threads = 0;
  std::int32_t* ids = nullptr;  ///< (rows, best) from `row` on; -1 where only NaN is left
  float* scores = nullptr;      ///< (rows, best) log-probabilities: logit - largest - log(sum of exp)
};

// ---- tables

/// The kernels of one instruction set.
struct Kernels {
  const char* name;
  /// Rows [row, row + rows) of elementwise work.
  void (*elementwise)(const Elementwise&, std::int64_t row, std::int64_t rows);
  void (*round_groups)(const Groups&, std::int64_t row, std::int64_t rows);
  void (*product)(const Product&, const Piece&);
  void (*norm)(const Normed&, std::int64_t row, std::int64_t rows);
  void (*embed)(const Embedding&, std::int64_t row, std::int64_t rows);
  void (*recur)(const Recurrence&);
  /// scratch: attention_scratch(positions + 1) floats, aligned to 64 bytes.
  void (*attend_self)(const SelfAttention&, const Heads&, float* scratch);
  void (*pack_source)(const Source&, std::int64_t head, std::int64_t heads);
  /// scratch: attention_scratch(length) floats, aligned to 64 bytes.
  void (*attend_shared)(const SharedAttention&, const Heads&, float* scratch);
  /// Before the first piece of an output layer: no best tokens so far.
  void (*start_output)(const Output&, std::int64_t threads);
  void (*output)(const Output&, const OutputPiece&);
  /// After the last piece.
  void (*finish_output)(const Output&, const Best&);
  /// exp, log, erf of `count` numbers, for tests.
  void (*exp)(const float* x, float* y, std::int64_t count);
  void (*log)(const float* x, float* y, std::int64_t count);
  void (*erf)(const float* x, float* y, std::int64_t count);
};

/// Names of all instruction sets of this build, best first.
std::vector<std::string> names();
/// A set by name; null where this build or this machine lacks it, see `refusal`.
const Kernels* named(const std::string& name);
/// Why `named` returned null: one line.
std::string refusal(const std::string& name);
/// The best set of this machine.
const Kernels& best();

}  // namespace tformer::kernels
