#include "command_line.hpp"

#include <charconv>
#include <functional>
#include <map>

const char* const help_text = R"(Usage: tformer-cpp translate [OPTIONS] BUNDLE
       tformer-cpp --version

  Translate standard input to standard output, line by line.

Options:
  --backend NAME          ort: ONNX Runtime; native: the library's own CPU engine; trt: TensorRT plans. [ort]
  --variant NAME          Variant to run; fp32: the standard graphs. With trt, the precision of the plans.
  --shortlist             Score only the tokens of the bundle's shortlist, see tformer shortlist.
  --beams N               Beam width; 1: greedy.
  --n-best N              Outputs per line, as NUMBER ||| TEXT ||| SCORE.
  --sample                Sample tokens; --n-best is the number of samples.
  --seed N                Seed of --sample.
  --max-tokens N          Longest output in tokens.
  --set NAME=VALUE        Any decoding option, such as length_penalty=0.6.
  --prefix FILE           Text that each output must begin with, one per input line.
  --allowed FILE          The only outputs allowed, one per line.
  --first-token ENTRY     Vocabulary entry that outputs begin with; repeatable.
  --suppress ENTRY        Vocabulary entry that is never produced; repeatable.
  --end-token ENTRY       Vocabulary entry that ends outputs; repeatable.
  --align                 Add the source position of each token: TEXT ||| 0-0.
  --stream                Print tokens as they are produced, one line at a time.
  --batch-tokens N        Padded source tokens per batch and beam; 0: 4096, native: by the model's sizes. [0]
  --max-line-bytes N      Longest input line in bytes; a longer one is an error. [1048576]
  --threads N             Threads per batch; 0: the cores, divided by the workers. [0]
  --workers N             Batches decoded at a time; 0: one per core if there is enough text, 1 on a GPU. [0]
  --json                  Print results as JSON: text, ids, score.
  --ids                   Input lines are token ids of the source, not text.
  --score                 Input lines are SOURCE tab TARGET: print the log-probability of each target token.
  --onnxruntime FILE      ONNX Runtime's file or folder; else TFORMER_ONNXRUNTIME, else what the loader finds.
  --tensorrt FILE         The same for TensorRT, with TFORMER_TENSORRT.
  --kernels NAME          With native: the instruction set, such as avx2, in place of the best of this machine.
  --no-verify             Do not compare files with their SHA-256.
  --help                  Show this message and exit.
)";

namespace {

long whole(const std::string& flag, const std::string& value, long least, long most) {
  long number = 0;
  const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (problem != std::errc() || end != value.data() + value.size() || number < least || number > most) {
    throw UsageError("invalid value for '" + flag + "': '" + value + "' is not a whole number from " +
                     std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

/// Refuse what is not a whole number. The library checks its range.
void number(const std::string& flag, const std::string& value) {
  const std::size_t digits = value.rfind('-', 0) == 0 ? 1 : 0;
  if (digits == value.size() || value.find_first_not_of("0123456789", digits) != std::string::npos) {
    throw UsageError("invalid value for '" + flag + "': '" + value + "' is not a whole number");
  }
}

}  // namespace

CommandLine parse_command_line(const std::vector<std::string>& arguments) {
  CommandLine line;
  std::vector<std::pair<std::string, std::string>> settings;  // of --set; other flags override them
  constexpr long most = 1L << 30;
  using Value = const std::string&;
  const auto decoding = [&line](const char* flag, const char* name) {
    return [&line, flag, name](Value value) { number(flag, value), line.translator.emplace_back(name, value); };
  };
  const auto entry = [&line](const char* name) {
    return [&line, name](Value value) { line.entries.emplace_back(name, value); };
  };
  const std::map<std::string, std::function<void(Value)>> with_value = {
      {"--backend", [&](Value value) { line.backend = value, line.model.emplace_back("backend", value); }},
      {"--tensorrt", [&](Value value) { line.model.emplace_back("tensorrt", value); }},
      {"--kernels", [&](Value value) { line.model.emplace_back("kernels", value); }},
      {"--variant", [&](Value value) { line.model.emplace_back("variant", value); }},
      {"--onnxruntime", [&](Value value) { line.model.emplace_back("onnxruntime", value); }},
      {"--threads", [&](Value value) { number("--threads", value), line.model.emplace_back("threads", value); }},
      {"--beams", decoding("--beams", "beams")},
      {"--n-best", decoding("--n-best", "n_best")},
      {"--seed", decoding("--seed", "seed")},
      {"--max-tokens", decoding("--max-tokens", "max_tokens")},
      {"--prefix", [&](Value value) { line.prefix_file = value; }},
      {"--allowed", [&](Value value) { line.allowed_file = value; }},
      {"--first-token", entry("first_ids")},
      {"--suppress", entry("suppress")},
      {"--end-token", entry("end_ids")},
      {"--batch-tokens",
       [&](Value value) {
         const auto tokens = static_cast<std::size_t>(whole("--batch-tokens", value, 0, 1 << 24));
         if (tokens) line.window_tokens = tokens;
         line.translator.emplace_back("batch_tokens", value);
       }},
      {"--max-line-bytes",
       [&](Value value) { line.max_line_bytes = static_cast<std::size_t>(whole("--max-line-bytes", value, 1, most)); }},
      {"--workers", [&](Value value) { line.workers = whole("--workers", value, 0, most); }},
      {"--set",
       [&](Value value) {
         const std::size_t equals = value.find('=');
         if (equals == std::string::npos) throw UsageError("--set " + value + ": must be NAME=VALUE");
         settings.emplace_back(value.substr(0, equals), value.substr(equals + 1));
       }},
  };
  const std::map<std::string, std::function<void()>> switches = {
      {"--shortlist", [&] { line.model.emplace_back("shortlist", "true"); }},
      {"--no-verify", [&] { line.model.emplace_back("verify", "false"); }},
      {"--sample", [&] { line.translator.emplace_back("sampling", "true"); }},
      {"--align", [&] { line.align = true, line.translator.emplace_back("align", "true"); }},
      {"--stream", [&] { line.stream = true; }},
      {"--json", [&] { line.json = true; }},
      {"--ids", [&] { line.ids = true; }},
      {"--score", [&] { line.score = true; }},
      {"--help", [&] { line.help = true; }},
      {"--version", [&] { line.version = true; }},
  };
  std::vector<std::string> words;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    std::string flag = arguments[i];
    std::optional<std::string> value;
    if (flag.rfind("--", 0) == 0 && flag.find('=') != std::string::npos) {
      value = flag.substr(flag.find('=') + 1);
      flag.erase(flag.find('='));
    }
    if (const auto found = switches.find(flag); found != switches.end() && !value) {
      found->second();
    } else if (const auto valued = with_value.find(flag); valued != with_value.end()) {
      if (!value && ++i == arguments.size()) throw UsageError("option '" + flag + "' requires an argument");
      valued->second(value ? *value : arguments[i]);
    } else if (flag.rfind("-", 0) == 0) {
      throw UsageError("no such option: " + flag);
    } else {
      words.push_back(flag);
    }
  }
  if (line.help || line.version) return line;
  if (words.empty() || words[0] != "translate") throw UsageError("no such command: say translate");
  if (words.size() != 2) throw UsageError(words.size() < 2 ? "missing argument BUNDLE" : "one BUNDLE, not several");
  line.bundle = words[1];
  line.translator.insert(line.translator.begin(), settings.begin(), settings.end());
  line.translator.emplace_back("max_line_bytes", std::to_string(line.max_line_bytes));
  if (line.stream && (line.json || line.align)) {
    throw UsageError("--stream prints plain text: leave out --json and --align");
  }
  if (line.ids && (line.stream || line.prefix_file)) {
    throw UsageError("--ids is for lines without text: leave out --stream and --prefix");
  }
  if (line.score && (line.ids || line.json || line.stream || line.prefix_file || line.allowed_file)) {
    throw UsageError("--score searches nothing: leave out --ids, --json, --stream, --prefix and --allowed");
  }
  return line;
}
