#include "native/run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tformer::native {
namespace {

using kernels::padded;

/// Nanoseconds of work that are worth another piece: fetching the first cache lines of a piece that another core has
/// written, and counting it, take some hundred.
constexpr double worth = 4000;
/// Pieces of a stage for each thread, so that a thread that starts late, or is interrupted, does fewer than the others.
constexpr std::int64_t pieces_each = 4;
/// Rows of a product that are done together. In 8 bits, 320 of 2,048 inputs are 640 KiB: they stay in a core's own cache
/// while panel after panel of weights passes. A multiple of 32, the rows of a tile of two registers.
constexpr std::int64_t rows_together = 320;

}  // namespace

Run::Run(const Code& code, const kernels::Kernels& kernels, int threads)
    : kernels_(kernels), threads_(threads), values_(code), scratch_(static_cast<std::size_t>(threads)) {
  for (const Instruction& each : code.instructions) {
    if (each.op == Op::give) continue;
    const bool product = each.op == Op::matmul || each.op == Op::output;
    if (product && each.matrix.numbers == kernels::Numbers::int4) stages_.push_back({&each, Stage::groups});
    stages_.push_back({&each, Stage::whole});
    if (each.op == Op::output) stages_.push_back({&each, Stage::finish});
  }
}

std::uint32_t Run::share(double nanoseconds, std::int64_t most) const {
  if (threads_ == 1) return 1;
  const auto wanted = static_cast<std::int64_t>(std::min(nanoseconds / worth, 1e6)) + 1;  // 1e6: more than threads
  const std::int64_t found = std::max<std::int64_t>(1, std::min({wanted, most, threads_ * pieces_each}));
  return static_cast<std::uint32_t>(found > threads_ ? found - found % threads_ : found);  // as many for each thread
}

/// Nanoseconds that an instruction takes for all rows on one thread.
double Run::cost(const Instruction& it) const {
  const auto rows = static_cast<double>(rows_);
  if (!it.matrix.weights) return rows * static_cast<double>(it.width) / floats_moved;
  const double weights = static_cast<double>(it.matrix.outputs) * static_cast<double>(it.matrix.inputs);
  const bool floats = it.matrix.numbers == kernels::Numbers::fp32 || it.matrix.numbers == kernels::Numbers::bf16;
  const double bytes = weights * (floats ? 4 : 1);
  return std::max(bytes / bytes_read, weights * rows / (floats ? floats_multiplied : integers_multiplied));
}

void Run::plan(std::int64_t rows, std::int64_t positions, Memory& memory) {
  rows_ = rows;
  values_.resize(size(rows), memory);
  const std::int64_t floats = scratch_floats(positions);
  if (floats > scratch_size_) {
    scratch_size_ = 0;  // as in Values::resize
    const std::int64_t more = padded(floats * 5 / 4);  // a quarter more: not anew for each longer target
    for (Block& each : scratch_) {
      each = Block();
      each = memory.take(size(more));
    }
    scratch_size_ = more;
  }
  for (Stage& stage : stages_) {
    const Instruction& it = *stage.it;
    if (it.op == Op::matmul && stage.part == Stage::whole) {
      const std::int64_t blocks = (rows + rows_together - 1) / rows_together, panels = kernels::panels_of(it.matrix);
      const std::int64_t wanted = share(cost(it), panels * blocks);
      stage.columns = static_cast<std::uint32_t>(std::min(panels, (wanted + blocks - 1) / blocks));
      stage.pieces = stage.columns * static_cast<std::uint32_t>(blocks);
    } else if (it.op == Op::self || it.op == Op::recur || it.op == Op::cross || it.op == Op::keep || it.op == Op::output) {
      stage.pieces = pieces_of(stage);
    } else {
      stage.pieces = share(cost(it), rows);
    }
  }
  if (rows <= group_rows_) return;
  std::int64_t inputs = 0, groups = 0;
  for (const Stage& stage : stages_) {
    if (stage.part != Stage::groups) continue;
    const kernels::Matrix& matrix = stage.it->matrix;
    inputs = std::max(inputs, padded(matrix.inputs, matrix.group));
    groups = std::max(groups, padded(matrix.inputs, matrix.group) / matrix.group);
  }
  if (!inputs) return;
  const std::int64_t more = padded(rows, 32);
  group_integers_ = memory.take(size(more * inputs / 4));
  group_scales_ = memory.take(size(more * groups));
  group_sums_ = memory.take(size(more * groups));
  group_rows_ = more;
}

void Run::piece(std::size_t number, std::uint32_t piece, int worker) {
  const Stage& stage = stages_[number];
  const Instruction& it = *stage.it;
  const std::int64_t row = rows_ * piece / stage.pieces, rows = rows_ * (piece + 1) / stage.pieces - row;
  if (stage.part == Stage::groups) {
    kernels::Groups groups;
    groups.x = values_.floats(it.x);
    groups.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
    groups.width = it.matrix.inputs;
    groups.group = it.matrix.group;
    groups.integers = reinterpret_cast<std::int8_t*>(group_integers_.data());
    groups.scales = group_scales_.data();
    groups.sums = reinterpret_cast<std::int32_t*>(group_sums_.data());
    kernels_.round_groups(groups, row, rows);
    return;
  }
  switch (it.op) {
    case Op::embed: return embed(it, row, rows);
    case Op::norm: return normalise(it, row, rows);
    case Op::matmul: return product(stage, piece);
    case Op::self:
    case Op::recur:
    case Op::cross:
    case Op::keep: return attend(stage, piece, worker);
    case Op::output: return output(stage, piece, worker);
    case Op::give: return;
    case Op::round:
    case Op::activate:
    case Op::add:
    case Op::multiply: return elementwise(it, row, rows);
  }
}

kernels::Input Run::input(const Instruction& it) const {
  kernels::Input x;
  x.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
  if (it.matrix.numbers == kernels::Numbers::int8) {
    x.integers = values_.bytes(it.x.value);
    x.step = it.step;
    x.zero = it.zero;
  } else if (it.matrix.numbers == kernels::Numbers::int4) {
    x.integers = group_integers_.data();
    x.ld = padded(it.matrix.inputs, it.matrix.group);
    x.scales = group_scales_.data();
    x.sums = reinterpret_cast<const std::int32_t*>(group_sums_.data());
  } else {
    x.floats = values_.floats(it.x);
  }
  return x;
}

void Run::elementwise(const Instruction& it, std::int64_t row, std::int64_t rows) {
  kernels::Elementwise work;
  work.x = values_.floats(it.x);
  work.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
  work.width = it.width;
  work.finish.activation = it.activation;
  const float* y = it.y ? values_.floats(it.y) : nullptr;
  const auto ld = static_cast<std::int64_t>(values_.stride(it.y.value));
  if (it.op == Op::multiply) {
    work.finish.gate = y;
    work.finish.gate_ld = ld;
  } else {
    work.finish.residual = y;
    work.finish.residual_ld = ld;
  }
  work.finish.to = target(it);
  kernels_.elementwise(work, row, rows);
}

void Run::normalise(const Instruction& it, std::int64_t row, std::int64_t rows) {
  kernels::Normed norm;
  norm.norm = it.norm;
  norm.eps = it.eps;
  norm.gain = it.gain;
  norm.bias = it.bias;
  norm.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
  norm.width = it.width / it.heads;
  for (std::int64_t first = 0; first < it.width; first += norm.width) {
    norm.x = values_.floats(it.x) + first;
    norm.to = target(it, 0, first);
    kernels_.norm(norm, row, rows);
  }
}

void Run::embed(const Instruction& it, std::int64_t row, std::int64_t rows) {
  kernels::Embedding embedding;
  embedding.ids = ids_.data();
  embedding.width = it.width;
  (it.scales ? static_cast<void>(embedding.integers = static_cast<const std::int8_t*>(it.table))
             : static_cast<void>(embedding.floats = static_cast<const float*>(it.table)));
  embedding.scales = it.scales;
  embedding.scale = it.factor;
  embedding.positions = it.positions;
  embedding.places = places_.data();
  embedding.out = values_.floats(it.out);
  embedding.ld = static_cast<std::int64_t>(values_.stride(it.out));
  kernels_.embed(embedding, row, rows);
}

void Run::product(const Stage& stage, std::uint32_t piece) {
  const Instruction& it = *stage.it;
  kernels::Product product;
  product.matrix = it.matrix;
  product.x = input(it);
  product.finish.activation = it.activation;
  if (it.gate) product.finish.gate = values_.floats(it.gate);
  product.finish.gate_ld = static_cast<std::int64_t>(values_.stride(it.gate.value));
  if (it.residual) product.finish.residual = values_.floats(it.residual);
  product.finish.residual_ld = static_cast<std::int64_t>(values_.stride(it.residual.value));
  product.finish.to = target(it);
  const std::int64_t block = piece / stage.columns, column = piece % stage.columns;
  const std::int64_t panels = kernels::panels_of(it.matrix), first = panels * column / stage.columns;
  kernels::Piece part;
  part.row = block * rows_together;
  part.rows = std::min(rows_together, rows_ - part.row);
  part.panel = first;
  part.panels = panels * (column + 1) / stage.columns - first;
  kernels_.product(product, part);
}

}  // namespace tformer::native
