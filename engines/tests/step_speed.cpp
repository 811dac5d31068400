// step_speed BUNDLE VARIANT [NAME=NUMBER]... [kernels=SET]: where the time of a step, or of the encoder, goes on one core,
// beside what each stage must read and multiply at least. Numbers: batch, beams, source, position (tokens before), encoder
// (1: that instead of a step), threads (of the whole; stages are shown for one). Times are quick ones of many: one in 50 is quicker.
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>

#include "errors.hpp"
#include "machine.hpp"
#include "native/encoder_run.hpp"
#include "native/executor.hpp"
#include "native/step_run.hpp"

namespace {

using namespace tformer;
using namespace tformer::native;

double quick(std::vector<double> found) {
  std::sort(found.begin(), found.end());
  return found[found.size() / 50];
}

/// Runs another job and keeps what each stage takes.
class Timed final : public Job {
 public:
  explicit Timed(Run& of) : of_(of), seconds(of.stages()) {}
  std::size_t stages() const override { return of_.stages(); }
  std::uint32_t pieces(std::size_t stage) const override { return of_.pieces(stage); }
  void piece(std::size_t stage, std::uint32_t piece, int worker) override {
    const double start = now();
    of_.piece(stage, piece, worker);
    seconds[stage].push_back(now() - start);
  }

 private:
  Run& of_;

 public:
  std::vector<std::vector<double>> seconds;
};

struct Sizes {
  double batch = 1, beams = 1, source = 20, position = 16, encoder = 0, threads = 1;
};

/// Bytes that a stage must read: weights, or caches; and what it multiplies, in 8-bit integers or floats.
struct Least {
  std::string name;
  double bytes = 0, products = 0;
};

const char* name_of(Op op) {
  switch (op) {
    case Op::embed: return "embed";
    case Op::norm: return "norm";
    case Op::round: return "round";
    case Op::matmul: return "matmul";
    case Op::activate: return "activate";
    case Op::add: return "add";
    case Op::multiply: return "multiply";
    case Op::self: return "self-attention";
    case Op::recur: return "recurrence";
    case Op::cross: return "cross-attention";
    case Op::keep: return "keep";
    case Op::output: return "output";
    case Op::give: return "give";
  }
  throw std::logic_error("an operation without a name");
}

Least least_of(const Run::Stage& stage, const Sizes& sizes, const CacheSizes& caches) {
  const Instruction& it = *stage.it;
  static const char* const kinds[] = {"fp32", "bf16", "int8", "int4"};
  Least least{name_of(it.op), 0, 0};
  const double rows = sizes.batch * (sizes.encoder > 0 ? sizes.source : sizes.beams);
  const auto width = static_cast<double>(it.heads * it.size), cached = static_cast<double>(caches.bytes(1));
  if (stage.part != Run::Stage::whole) {
    least.name += stage.part == Run::Stage::groups ? ", inputs rounded" : ", best of all";
  } else if (it.matrix.weights) {
    const kernels::Matrix& m = it.matrix;
    const double each[] = {4, 2, 1, 0.5 + 4.0 / static_cast<double>(std::max<std::int64_t>(m.group, 1))};
    least.bytes = static_cast<double>(m.inputs * m.outputs) * each[static_cast<int>(m.numbers)];
    least.products = rows * static_cast<double>(m.inputs * m.outputs);
    least.name += std::string(" ") + kinds[static_cast<int>(m.numbers)] + " " + std::to_string(m.inputs) + " x " +
                  std::to_string(m.outputs);
  } else if (it.op == Op::self && sizes.encoder == 0) {
    least.bytes = rows * (sizes.position + 1) * 2 * width * cached;
  } else if (it.op == Op::cross) {
    least.bytes = sizes.batch * sizes.source * 2 * width * cached;
  }
  return least;
}

/// Sentences of one length that are all at a position, with caches that hold some numbers.
void begin(NativeState& state, Executor& executor, const Sizes& sizes, std::int32_t vocab) {
  const auto batch = static_cast<std::size_t>(sizes.batch), length = static_cast<std::size_t>(sizes.source);
  std::vector<std::int32_t> ids(batch * length), lengths(batch, static_cast<std::int32_t>(length));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i * 7919 % static_cast<std::size_t>(vocab));
  executor.encode(ids, lengths, state.sentences);
  state.beams = static_cast<std::size_t>(sizes.beams);
  const auto position = static_cast<std::size_t>(sizes.position);
  for (Sentence& each : state.sentences) {
    const std::size_t capacity = std::max<std::size_t>(32, 2 * position);
    grow(each, state.beams, capacity, executor.sizes(), executor.blocks());
    // 0.05 in fp32 and in bf16
    std::memset(each.own.data(), 0x3D, executor.sizes().bytes(state.beams * executor.sizes().whole(capacity)));
    each.moved = state.beams > 1;
    each.position = position;
  }
}

int show(const std::string& folder, const std::string& variant, const Sizes& sizes, const std::string& set) {
  const Bundle bundle = Bundle::open(std::filesystem::path(folder), false);
  const auto program = std::make_shared<const Program>(bundle, variant);
  const Choice choice{static_cast<int>(sizes.threads), set};
  const kernels::Kernels& kernels = kernels_of(choice);
  Executor executor(program, bundle.model(), bundle.recipe(variant), choice);
  measure_machine(kernels.name);
  NativeState state;
  begin(state, executor, sizes, bundle.model().tgt_vocab);
  const std::size_t rows = state.rows();
  const auto best = static_cast<std::size_t>(2 * state.beams);
  const std::vector<std::int32_t> tokens(rows, 7);
  Scores scores;
  EncoderRun encoder(program->encoder(), kernels, 1);
  StepRun step(program->step(), kernels, 1);
  const bool encodes = sizes.encoder > 0;
  Run& run = encodes ? static_cast<Run&>(encoder) : step;
  Timed timed(run);
  Pool alone(1);
  std::vector<std::int32_t> ids(state.sentences.size() * static_cast<std::size_t>(sizes.source), 9);
  std::vector<double> whole, shared;
  for (const double start = now(); whole.size() < 20 || now() - start < 4;) {
    const auto once = [&](std::vector<double>& found, const auto& work) {
      const double began = now();
      work();
      found.push_back(now() - began);
    };
    once(whole, [&] {
      if (encodes) {
        encoder.prepare(ids.data(), static_cast<std::size_t>(sizes.source), state.sentences.data(), state.sentences.size(),
                        executor.sizes(), executor.blocks());
      } else {
        step.prepare(tokens, state, best, {}, executor.sizes(), executor.blocks(), scores);
      }
      alone.run(timed);
    });
    once(shared, [&] {
      if (encodes) {
        std::vector<Sentence> others;
        executor.encode(ids, std::vector<std::int32_t>(state.sentences.size(), static_cast<std::int32_t>(sizes.source)), others);
      } else {
        executor.step(tokens, state, best, {}, scores);
        for (Sentence& each : state.sentences) --each.position;
      }
    });
  }
  struct Line {
    int count = 0;
    double seconds = 0, bytes = 0, products = 0;
  };
  std::map<std::string, Line> lines;
  Line all;
  for (std::size_t i = 0; i < run.stages(); ++i) {
    const Least least = least_of(run.stage(i), sizes, executor.sizes());
    for (Line* line : {&lines[least.name], &all}) {
      ++line->count;
      line->seconds += quick(timed.seconds[i]);
      line->bytes += least.bytes;
      line->products += least.products;
    }
  }
  std::printf("%s, %s, batch %.0f x %.0f, source %.0f, position %.0f: memory %.1f GB/s, 8-bit peak %.3f T products/s\n",
              variant.c_str(), kernels.name, sizes.batch, sizes.beams, sizes.source, sizes.position, bandwidth / 1e9,
              peak / 1e12);
  lines["stages together"] = all;
  for (const auto& [name, line] : lines) {
    std::printf("%-34s %3d  %8.1f us", name.c_str(), line.count, line.seconds * 1e6);
    if (line.bytes > 0) {
      std::printf("  %7.3f MB, %5.2f of reading them", line.bytes / 1e6, line.seconds * bandwidth / line.bytes);
    }
    if (line.products > 0 && peak > 0) std::printf(", %4.1f %% of peak", 100 * line.products / line.seconds / peak);
    std::printf("\n");
  }
  const double one = quick(whole), each = quick(shared);
  std::printf("whole, timed %.1f us; by the executor, %d threads, %.1f us: %.2f of reading on one core\n", one * 1e6,
              choice.threads, each * 1e6, each * bandwidth / all.bytes);
  return 0;
}

}  // namespace

int main(int count, char** words) try {
  const std::string usage =
      "usage: step_speed BUNDLE VARIANT [batch|beams|source|position|encoder|threads=NUMBER]... [kernels=SET]";
  if (count < 3) throw std::invalid_argument(usage);
  Sizes sizes;
  std::string set;
  const std::map<std::string, double*> names{{"batch", &sizes.batch},       {"beams", &sizes.beams},
                                             {"source", &sizes.source},     {"position", &sizes.position},
                                             {"encoder", &sizes.encoder},   {"threads", &sizes.threads}};
  for (int i = 3; i < count; ++i) {
    const std::string word = words[i], name = word.substr(0, word.find('=')), value = word.substr(word.find('=') + 1);
    if (name == "kernels") set = value;
    else if (names.count(name)) *names.at(name) = std::stod(value);
    else throw std::invalid_argument("unknown name '" + name + "'; " + usage);
  }
  return show(words[1], words[2], sizes, set);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
