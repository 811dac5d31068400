// How long steps take outside ONNX Runtime: overhead BUNDLE REPEATS [NAME=VALUE]... < LINES
//
// Lines are translated together, once to warm up and REPEATS times for the clock; options are those of tformer.h. Prints
// JSON: seconds, seconds inside ONNX Runtime, and how often a graph ran (the encoder once, then the steps). With another
// backend the last two are 0.
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "ort/library.hpp"
#include "translator.hpp"

using tformer::Translator;

namespace {

using Clock = std::chrono::steady_clock;

OrtApi timed;  // the library's, but for Run
decltype(OrtApi::Run) own_run;
double inside = 0;
long runs = 0;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

OrtStatusPtr ORT_API_CALL run(OrtSession* session, const OrtRunOptions* options, const char* const* input_names,
                              const OrtValue* const* inputs, std::size_t input_count, const char* const* output_names,
                              std::size_t output_count, OrtValue** outputs) NO_EXCEPTION {
  const auto start = Clock::now();
  OrtStatusPtr status =
      own_run(session, options, input_names, inputs, input_count, output_names, output_count, outputs);
  inside += since(start);
  ++runs;
  return status;
}

void translate(Translator& translator, const std::vector<std::string_view>& lines) {
  const tformer::Results results = translator.translate(lines, {}, 0);
  if (results.error) std::rethrow_exception(results.error);
}

}  // namespace

int main(int count, char** arguments) try {
  if (count < 3) throw std::invalid_argument("usage: overhead BUNDLE REPEATS [NAME=VALUE]... < LINES");
  tformer::Settings settings;
  for (int i = 3; i < count; ++i) {
    const std::string option = arguments[i];
    const std::size_t equals = std::min(option.find('='), option.size());
    settings.set(option.substr(0, equals), option.substr(std::min(equals + 1, option.size())));
  }
  std::vector<std::string> lines;
  for (std::string line; std::getline(std::cin, line);) lines.push_back(line);
  const std::vector<std::string_view> views(lines.begin(), lines.end());
  const auto model = std::make_shared<const tformer::OpenModel>(std::filesystem::path(arguments[1]), settings);
  if (settings.open.backend == "ort") {
    timed = Ort::GetApi();
    own_run = timed.Run;
    timed.Run = run;
    Ort::InitApi(&timed);
  }
  Translator translator(model, settings);
  translate(translator, views);
  inside = 0;
  runs = 0;
  const auto start = Clock::now();
  for (int i = 0; i < std::stoi(arguments[2]); ++i) translate(translator, views);
  std::cout << nlohmann::json{{"seconds", since(start)}, {"inside", inside}, {"runs", runs}} << '\n';
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
