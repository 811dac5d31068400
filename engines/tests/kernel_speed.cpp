// kernel_speed [SET [WORD]]: the time of each kernel (whose line has the word) on one core, beside what the core reads
// from memory and multiplies at most. A quick call of many (the first tenth), as others may use the machine; weights are
// taken in turn from more of them than a core's own caches hold.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "machine.hpp"

namespace {

using namespace tformer::kernels;

std::string wanted;

/// Seconds of a call that is not disturbed: of those of 0.3 seconds, but at least 20, a tenth is faster. Calls that are
/// too short for the clock are made together.
double seconds(const std::function<void()>& call) {
  std::vector<double> found;
  const double start = now();
  call();
  const int together = now() - start < 2e-6 ? 32 : 1;
  while (found.size() < 20 || now() - start < 0.3) {
    const double began = now();
    for (int i = 0; i < together; ++i) call();
    found.push_back((now() - began) / together);
  }
  std::sort(found.begin(), found.end());
  return found[found.size() / 10];
}

/// Weights of one kind, as many copies as fill 48 MiB.
class Weights {
 public:
  Weights(Numbers numbers, std::int64_t inputs, std::int64_t outputs)
      : numbers_(numbers), inputs_(inputs), outputs_(outputs),
        scales_(memory<float>(padded(outputs) * (inputs / 32 + 1), 1e-3F)), sums_(memory<std::int32_t>(padded(outputs), 5)) {
    copies_ = std::clamp<std::int64_t>((std::int64_t(48) << 20) / bytes(), 1, 64);
    data_ = memory<char>(bytes() * copies_, 3);
    std::uint32_t random = 1;
    const bool floats = numbers == Numbers::fp32 || numbers == Numbers::bf16;
    for (std::int64_t i = 0; i < bytes() * copies_; ++i) {  // scores that differ; floats of 0x3C3C3C3C
      random = random * 1664525U + 1013904223U;
      data_.get()[i] = floats ? '\x3C' : static_cast<char>(random >> 27U);
    }
  }
  std::int64_t copies() const { return copies_; }
  std::int64_t bytes() const {
    const std::int64_t count = padded(outputs_) * padded(inputs_, 64);
    switch (numbers_) {
      case Numbers::fp32: return count * 4;
      case Numbers::bf16: return count * 2;
      case Numbers::int4: return count / 2;
      default: return count;
    }
  }
  Matrix matrix(std::int64_t copy) const {
    Matrix made;
    made.numbers = numbers_;
    made.inputs = inputs_;
    made.outputs = outputs_;
    made.group = 32;
    made.weights = data_.get() + copy * bytes();
    made.scales = scales_.get();
    made.sums = sums_.get();
    made.bias = scales_.get();
    return made;
  }

 private:
  Numbers numbers_;
  std::int64_t inputs_, outputs_, copies_ = 0;
  Memory<float> scales_;
  Memory<std::int32_t> sums_;
  Memory<char> data_;
};

/// One line, if it is wanted.
void show(const std::string& name, const std::function<void()>& call, double products = 0, double bytes = 0) {
  if (name.find(wanted) == std::string::npos) return;
  const double taken = seconds(call);
  std::printf("%-44s %9.2f us", name.c_str(), taken * 1e6);
  if (products > 0) std::printf("  %6.3f T products/s", products / taken / 1e12);
  if (products > 0 && peak > 0) std::printf(" (%3.0f %% of peak)", 100 * products / taken / peak);
  if (bytes > 0) std::printf("  %6.1f GB/s, %.2f of reading the weights", bytes / taken / 1e9, taken * bandwidth / bytes);
  std::printf("\n");
  std::fflush(stdout);
}

void product_speed(const Kernels& kernels, Numbers numbers, std::int64_t rows, std::int64_t inputs, std::int64_t outputs,
                   bool narrow) {
  const Weights weights(numbers, inputs, outputs);
  const std::int64_t bytes_ld = inputs + 64, rounded_ld = outputs + 64, out_ld = outputs + 16;  // see kernels.hpp
  const auto bytes = memory<std::uint8_t>((rows + 16) * bytes_ld, 3);
  const auto floats = memory<float>(rows * bytes_ld, 0.5F), out = memory<float>(rows * out_ld);
  const auto rounded = memory<std::uint8_t>(rows * rounded_ld);
  const auto scales = memory<float>(rows * inputs, 0.1F);
  const auto sums = memory<std::int32_t>(rows * inputs, 4);
  Product product;
  product.x = {floats.get(), bytes.get(), numbers == Numbers::int4 ? inputs : bytes_ld, 0.1F, 3, scales.get(), sums.get()};
  if (narrow) {
    product.finish.activation = Activation::relu;
    product.finish.to.bytes = rounded.get();
    product.finish.to.bytes_ld = rounded_ld;
  } else {
    product.finish.to.floats = out.get();
    product.finish.to.ld = out_ld;
  }
  std::int64_t turn = 0;
  const auto call = [&] {
    product.matrix = weights.matrix(turn++ % weights.copies());
    kernels.product(product, {0, rows, 0, panels_of(product.matrix)});
  };
  static const char* const kinds[] = {"fp32", "bf16", "int8", "int4"};
  const std::string name = std::string(kinds[static_cast<int>(numbers)]) + " " + std::to_string(rows) + " x " +
                           std::to_string(inputs) + " x " + std::to_string(outputs) + (narrow ? " relu, to 8 bits" : "");
  show(name, call, static_cast<double>(rows * inputs * outputs), static_cast<double>(weights.bytes()));
}

void output_speed(const Kernels& kernels, std::int64_t rows, std::int64_t inputs, std::int64_t outputs, std::int64_t best) {
  const Weights weights(Numbers::int8, inputs, outputs);
  const auto bytes = memory<std::uint8_t>((rows + 16) * inputs, 3);
  for (std::int64_t i = 0; i < rows * inputs; ++i) bytes.get()[i] = static_cast<std::uint8_t>(i * 7919 % 251);
  Output work;
  work.x.integers = bytes.get();
  work.x.ld = inputs;
  work.x.step = 0.1F;
  work.best = best;
  work.rows = rows;
  work.matrix = weights.matrix(0);
  const std::int64_t blocks = blocks_of(work.matrix);
  const auto largest = memory<float>(rows * blocks), totals = memory<float>(rows * blocks);
  const auto best_logits = memory<float>(rows * best), scores = memory<float>(rows * best);
  const auto best_ids = memory<std::int32_t>(rows * best), ids = memory<std::int32_t>(rows * best);
  work.largest = largest.get();
  work.sums = totals.get();
  work.best_logits = best_logits.get();
  work.best_ids = best_ids.get();
  std::int64_t turn = 0;
  const auto call = [&] {
    work.matrix = weights.matrix(turn++ % weights.copies());
    kernels.start_output(work, 1);
    kernels.output(work, {0, rows, 0, blocks, 0});
    kernels.finish_output(work, {0, rows, 1, ids.get(), scores.get()});
  };
  show("output " + std::to_string(rows) + " x " + std::to_string(inputs) + " x " + std::to_string(outputs) + ", best " +
           std::to_string(best),
       call, static_cast<double>(rows * inputs * outputs), static_cast<double>(weights.bytes()));
}

/// So many numbers of a cache, all 0.05 in either type.
Memory<char> cache(Numbers cached, std::int64_t count) {
  return memory<char>(count * (cached == Numbers::bf16 ? 2 : 4), '\x3D');
}

void self_speed(const Kernels& kernels, Numbers cached, std::int64_t rows, std::int64_t heads, std::int64_t size,
                std::int64_t length) {
  const std::int64_t width = heads * size, stride = length * padded(size);
  const auto qkv = memory<float>(rows * 3 * width, 0.1F), out = memory<float>(rows * width);
  const auto keys = cache(cached, rows * heads * stride), values = cache(cached, rows * heads * stride);
  const auto scratch = memory<float>(attention_scratch(length));
  const auto positions = memory<std::int32_t>(rows, static_cast<std::int32_t>(length - 1));
  const auto written = memory<std::int32_t>(rows * length, 0);
  SelfAttention work;
  work.heads = heads;
  work.size = size;
  work.scale = 0.1F;
  work.q = qkv.get();
  work.k = qkv.get() + width;
  work.v = qkv.get() + 2 * width;
  work.ld = 3 * width;
  work.cached = cached;
  work.keys = keys.get();
  work.values = values.get();
  work.slot_stride = heads * stride;
  work.head_stride = stride;
  work.positions = positions.get();
  work.written_by = rows > 1 ? written.get() : nullptr;
  work.written_ld = length;
  work.to.floats = out.get();
  work.to.ld = width;
  const auto call = [&] { kernels.attend_self(work, {0, rows, 0, heads}, scratch.get()); };
  show("self-attention " + std::to_string(rows) + " rows, " + std::to_string(heads) + " x " + std::to_string(size) + ", " +
           std::to_string(length) + " positions" + (cached == Numbers::bf16 ? ", bf16" : ""),
       call, static_cast<double>(2 * rows * width * length));
}

void shared_speed(const Kernels& kernels, Numbers cached, std::int64_t queries, std::int64_t heads, std::int64_t size,
                  std::int64_t length, int chains) {
  const std::int64_t width = heads * size, stride = source_size(length, size);
  const auto q = memory<float>(queries * width, 0.1F), out = memory<float>(queries * width);
  const auto keys = cache(cached, heads * stride), values = cache(cached, heads * stride);
  const auto source = memory<float>(length * width, 0.1F), scratch = memory<float>(attention_scratch(length));
  SharedAttention work;
  work.heads = heads;
  work.size = size;
  work.length = length;
  work.scale = 0.1F;
  work.chains = chains;
  work.q = q.get();
  work.ld = width;
  work.cached = cached;
  work.keys = keys.get();
  work.values = values.get();
  work.head_stride = stride;
  work.to.floats = out.get();
  work.to.ld = width;
  const std::string name = std::to_string(queries) + " queries, " + std::to_string(heads) + " x " + std::to_string(size) +
                           ", " + std::to_string(length) + " positions" + (cached == Numbers::bf16 ? ", bf16" : "");
  const auto call = [&] { kernels.attend_shared(work, {0, queries, 0, heads}, scratch.get()); };
  show((chains == 4 ? "cross-attention " : "encoder ") + name, call, static_cast<double>(2 * queries * width * length));
  if (chains == 4) return;
  const Source pack{heads, size,   length,     source.get(), source.get(), width,
                    width, cached, keys.get(), values.get(), stride};
  show("  its keys and values packed", [&] { kernels.pack_source(pack, 0, heads); });
}

void row_speed(const Kernels& kernels, std::int64_t rows, std::int64_t width) {
  const auto x = memory<float>(rows * width, 0.3F), gain = memory<float>(width, 1.0F), out = memory<float>(rows * width);
  const auto bytes = memory<std::uint8_t>(rows * width);
  for (std::int64_t i = 0; i < rows * width; ++i) x.get()[i] = static_cast<float>(i * 7919 % 1000) / 100 - 5;
  const std::string shape = " " + std::to_string(rows) + " x " + std::to_string(width);
  Normed norm;
  norm.eps = 1e-5F;
  norm.gain = gain.get();
  norm.bias = gain.get();
  norm.x = x.get();
  norm.ld = width;
  norm.width = width;
  norm.to.bytes = bytes.get();
  norm.to.bytes_ld = width;
  show("layer norm, to 8 bits" + shape, [&] { kernels.norm(norm, 0, rows); });
  Elementwise work{x.get(), width, width, {}};
  work.finish.to.bytes = bytes.get();
  work.finish.to.bytes_ld = width;
  show("rounding" + shape, [&] { kernels.elementwise(work, 0, rows); });
  work.finish.activation = Activation::gelu;
  show("gelu, rounding" + shape, [&] { kernels.elementwise(work, 0, rows); });
  show("exp" + shape, [&] { kernels.exp(x.get(), out.get(), rows * width); });
}

}  // namespace

int main(int count, char** words) {
  const Kernels* found = count > 1 ? named(words[1]) : &best();
  if (count > 2) wanted = words[2];
  if (!found) {
    std::fprintf(stderr, "%s\n", refusal(words[1]).c_str());
    return 1;
  }
  const Kernels& kernels = *found;
  measure_machine(kernels.name);
  std::printf("%s: memory %.1f GB/s, 8-bit peak %.3f T products/s\n", kernels.name, bandwidth / 1e9, peak / 1e12);
  for (const std::int64_t rows : {1, 8, 32, 160}) {
    product_speed(kernels, Numbers::int8, rows, 512, 512, false);
    product_speed(kernels, Numbers::int8, rows, 512, 2048, true);
    product_speed(kernels, Numbers::int8, rows, 2048, 512, false);
  }
  product_speed(kernels, Numbers::int8, 640, 512, 1536, false);
  for (const std::int64_t rows : {1, 8, 32}) {
    product_speed(kernels, Numbers::int8, rows, 128, 128, false);
    product_speed(kernels, Numbers::int8, rows, 128, 512, true);
  }
  for (const Numbers numbers : {Numbers::fp32, Numbers::bf16, Numbers::int4}) {
    for (const std::int64_t rows : {1, 8, 32}) product_speed(kernels, numbers, rows, 512, 512, false);
  }
  product_speed(kernels, Numbers::int4, 1, 512, 2048, false);
  for (const std::int64_t rows : {1, 8, 32}) output_speed(kernels, rows, 512, 32000, 1);
  output_speed(kernels, 32, 512, 32000, 8);
  output_speed(kernels, 32, 128, 10000, 1);
  output_speed(kernels, 40, 128, 10000, 10);
  for (const Numbers cached : {Numbers::fp32, Numbers::bf16}) {
    for (const std::int64_t rows : {1, 8, 32}) self_speed(kernels, cached, rows, 8, 64, 20);
    self_speed(kernels, cached, 8, 8, 64, 200);
    self_speed(kernels, cached, 32, 8, 16, 16);
    self_speed(kernels, cached, 32, 4, 32, 16);
    shared_speed(kernels, cached, 1, 8, 64, 20, 4);
    shared_speed(kernels, cached, 4, 8, 64, 20, 4);
    shared_speed(kernels, cached, 5, 8, 16, 16, 4);
  }
  shared_speed(kernels, Numbers::fp32, 20, 8, 64, 20, 1);
  shared_speed(kernels, Numbers::fp32, 200, 8, 64, 200, 1);
  shared_speed(kernels, Numbers::fp32, 16, 8, 16, 16, 1);
  row_speed(kernels, 32, 512);
  row_speed(kernels, 32, 128);
  return 0;
}
