// Eight threads on one model, lines that some admit while others step, and a model that is opened and closed again and
// again: threads BUNDLE VARIANT TIMES LINE...
// Run it with ThreadSanitizer, AddressSanitizer, or as it is: it says how memory grew, and fails where models leak.
#include <atomic>
#include <cmath>
#include <fstream>
#include <iostream>
#include <numeric>
#include <string>
#include <thread>
#include <tformer/tformer.hpp>

namespace {

constexpr int many = 500;  // models, from which on growth says something: before, allocators still settle
constexpr long most_growth_kib = 20 << 10;

/// Resident memory in KiB.
long resident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmRSS:", 0) == 0) return std::stol(line.substr(6));
  }
  return 0;
}

std::string translated(const tformer::Model& model, const std::vector<std::string>& lines) {
  tformer::Translator translator(model, {{"beams", "3"}});
  std::string text;
  for (const auto& outputs : translator.translate(lines)) text += outputs[0].text + "\n";
  return text;
}

/// Engines side by side, which call back and score.
void side_by_side(const tformer::Model& model, const std::vector<std::string>& lines, const std::string& expected) {
  tformer::Translator translator(model, {{"beams", "3"}, {"workers", "3"}});
  std::vector<std::string> many, targets;
  for (int i = 0; i < 10; ++i) many.insert(many.end(), lines.begin(), lines.end());
  std::string text;
  for (const auto& outputs : translator.translate(many)) {
    targets.push_back(outputs[0].text);
    text += outputs[0].text + "\n";
  }
  std::string repeated;
  for (int i = 0; i < 10; ++i) repeated += expected;
  if (text != repeated) throw std::runtime_error("engines side by side disagree");
  const auto scored = translator.score(many, targets);
  for (std::size_t i = 0; i < many.size(); ++i) {
    const std::vector<double>&one = scored[i], &other = scored[i % lines.size()];
    const double sum = std::accumulate(one.begin(), one.end(), 0.0);
    const double off = std::abs(sum - std::accumulate(other.begin(), other.end(), 0.0));
    if (off > 0.05 * std::abs(sum) + 0.05) throw std::runtime_error("scores side by side disagree");
  }
}

/// Two threads admit lines, and give some up, while two step and then what has ended is taken.
void serve(const tformer::Model& model, const std::vector<std::string>& lines, const std::string& expected) {
  constexpr std::uint64_t each = 40;
  tformer::Serving serving(model, {{"beams", "3"}});
  std::atomic<int> admitting{2};
  std::atomic<std::size_t> wrong{0}, ended{0};
  const auto admit = [&](std::uint64_t first) {
    for (std::uint64_t i = 0; i < each; ++i) {
      serving.admit(lines[i % lines.size()], first + i);
      if (i % 5 == 4) serving.retire(first + i);
    }
    --admitting;
  };
  const auto step = [&] {
    while (serving.step() || admitting) std::this_thread::yield();
  };
  const auto take = [&] {
    for (const tformer::Served& line : serving.take()) {
      const std::string& own = lines[line.number % each % lines.size()];
      tformer::Translator alone(model, {{"beams", "3"}});
      wrong += line.status != TFORMER_OK || line.outputs[0].text != alone.translate({own})[0][0].text;
      ++ended;
    }
  };
  std::vector<std::thread> threads;
  threads.emplace_back(admit, 0);
  threads.emplace_back(admit, each);
  threads.emplace_back(step);
  threads.emplace_back(step);
  for (std::thread& thread : threads) thread.join();
  take();
  if (wrong || !ended || translated(model, lines) != expected) throw std::runtime_error("lines that share steps differ");
}

}  // namespace

int main(int count, char** arguments) try {
  if (count < 5) throw std::invalid_argument("usage: threads BUNDLE VARIANT TIMES LINE...");
  const std::string variant = arguments[2];
  const bool native = variant.rfind("native", 0) == 0;  // whose own threads work together
  const tformer::Options options = {
      {"variant", variant}, {"backend", native ? "native" : "ort"}, {"threads", native ? "3" : "1"}};
  const std::vector<std::string> lines(arguments + 4, arguments + count);
  const int times = std::stoi(arguments[3]);
  const tformer::Model model(arguments[1], options);
  const std::string expected = translated(model, lines);
  std::vector<std::thread> threads;
  std::vector<int> wrong(8, 0);
  for (int& own : wrong) {
    threads.emplace_back([&] {
      for (int i = 0; i < 3; ++i) own += translated(model, lines) != expected;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int each : wrong) {
    if (each) throw std::runtime_error("threads disagree");
  }
  side_by_side(tformer::Model(arguments[1], {{"variant", variant},
                                             {"backend", native ? "native" : "ort"},
                                             {"threads", "3"},
                                             {"workers", "3"}}),
               lines, expected);
  if (model.variant() != "fp32") serve(model, lines, expected);
  long first = 0;
  for (int i = 0; i < times; ++i) {
    const tformer::Model again(arguments[1], options);
    if (translated(again, lines) != expected) throw std::runtime_error("another model disagrees");
    if (i == times / 10) first = resident();
  }
  const long grown = resident() - first;
  std::cout << "8 threads agree; " << times << " models, memory grew by " << grown << " KiB since the "
            << times / 10 + 1 << "th\n";
  if (times >= many && grown > most_growth_kib) {
    throw std::runtime_error("memory grew by more than " + std::to_string(most_growth_kib) + " KiB: models leak");
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
