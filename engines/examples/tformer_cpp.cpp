// tformer-cpp: `tformer translate` without Python, as an example of the public API.
#include <malloc.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "command_line.hpp"

namespace {

constexpr std::size_t window_bytes = 16;  // per token of a batch: reads so far ahead, to batch lines of similar length
constexpr long lines_each = 8;            // lines per core from which one worker per core is fastest

struct Failed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string input_line(std::uint64_t number) { return "standard input, line " + std::to_string(number) + ": "; }

/// Lines of standard input in groups of about `budget` bytes; lines that have arrived do not wait for more. Ends with a
/// `problem`, the message for a bad line.
class Windows {
 public:
  Windows(std::size_t budget, std::size_t most) : budget_(budget), most_(most) {}

  /// The next group; empty at the end.
  std::vector<std::string> next() {
    std::vector<std::string> lines;
    for (std::size_t size = 0; size < budget_ && problem.empty();) {
      const std::size_t end = held_.find('\n', searched_);
      searched_ = std::min(end, held_.size());
      if (searched_ - begin_ > most_) {
        problem = input_line(number_ + 1) + "longer than " + std::to_string(most_) +
                  " bytes: split it, or raise --max-line-bytes";
      } else if (end == std::string::npos && !ended_) {
        if (!lines.empty() && !comes(0)) break;
        read_more();
      } else {
        if (end == std::string::npos && begin_ == held_.size()) break;
        lines.push_back(held_.substr(begin_, searched_ - begin_));
        size += lines.back().size() + 1;
        ++number_;
        begin_ = searched_ = std::min(searched_ + 1, held_.size());
      }
    }
    return lines;
  }
  std::string problem;

 private:
  std::size_t budget_, most_, number_ = 0;
  std::string held_;                         // input that was read,
  std::size_t begin_ = 0, searched_ = 0;     // where the next line begins, and up to where no end of it was found
  bool ended_ = false;

  /// Whether input can be read within that many ms; -1: waits for any time.
  static bool comes(int wait_ms) {
    pollfd source{STDIN_FILENO, POLLIN, 0};
    return ::poll(&source, 1, wait_ms) != 0;
  }

  void read_more() {
    held_.erase(0, begin_);
    searched_ -= begin_;
    begin_ = 0;
    char chunk[1 << 16];
    ssize_t count = 0;
    while ((count = ::read(STDIN_FILENO, chunk, sizeof chunk)) < 0 && (errno == EINTR || errno == EAGAIN)) comes(-1);
    if (count < 0) {
      problem = input_line(number_ + 1) + "cannot be read: " + std::strerror(errno) + ": give a file or a pipe";
    }
    ended_ = count <= 0;
    if (count > 0) held_.append(chunk, static_cast<std::size_t>(count));
  }
};

/// Lines without the white space of ASCII around them.
std::vector<std::string> read_lines(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored) || std::filesystem::is_directory(path, ignored)) {
    throw Failed(path + ": no such file");
  }
  if (std::filesystem::path(path).extension() == ".gz") throw Failed(path + ": is compressed: gunzip it");
  std::ifstream file(path);
  if (!file) throw Failed(path + ": cannot be read: name another file");
  const auto is_space = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r') || (c >= '\x1c' && c <= '\x1f'); };
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    const auto first = std::find_if_not(line.begin(), line.end(), is_space);
    lines.emplace_back(first, std::find_if_not(line.rbegin(), std::make_reverse_iterator(first), is_space).base());
  }
  return lines;
}

std::vector<std::int32_t> parse_ids(const std::string& line, std::uint64_t number) {
  std::istringstream words(line);
  std::vector<std::int32_t> ids;
  for (std::string word; words >> word;) {
    std::int32_t id = 0;
    const auto [end, problem] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (problem != std::errc() || end != word.data() + word.size()) {
      std::replace(word.begin(), word.end(), '\0', '?');  // it would end the message
      throw Failed(input_line(number) + "'" + word + "' is no token id: give whole numbers");
    }
    ids.push_back(id);
  }
  return ids;
}

/// A number as Python writes it.
std::string number(double value) {
  if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";
  char text[40];
  const bool far = value != 0 && (std::abs(value) < 1e-4 || std::abs(value) >= 1e16);
  const auto format = far ? std::chars_format::scientific : std::chars_format::fixed;
  const std::string made(text, std::to_chars(text, text + sizeof text, value, format).ptr);
  return made.find_first_of(".e") == std::string::npos ? made + ".0" : made;
}

template <typename Values, typename Show>
std::string list(const Values& values, const Show& show) {
  std::string text;
  for (const auto& value : values) text += (text.empty() ? "" : ", ") + show(value);
  return "[" + text + "]";
}

std::string quoted(const std::string& text) {
  static const std::string escaped = "\"\\\n\r\t\b\f", letters = "\"\\nrtbf";
  std::string made = "\"";
  for (const char letter : text) {
    char code[8];
    if (const std::size_t i = escaped.find(letter); i != std::string::npos) {
      made += '\\';
      made += letters[i];
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(letter));
      made += code;
    } else {
      made += letter;
    }
  }
  return made + "\"";
}

std::string json(const tformer::Output& it, const std::vector<tformer::Output>& others) {
  const auto whole = [](std::int32_t value) { return std::to_string(value); };
  return "{\"text\": " + quoted(it.text) + ", \"ids\": " + list(it.ids, whole) + ", \"score\": " + number(it.score) +
         ", \"finished\": " + (it.finished ? "true" : "false") +
         ", \"alignment\": " + list(it.alignment, whole) + ", \"alternatives\": " +
         list(others, [](const tformer::Output& other) { return json(other, {}); }) + "}";
}

/// A text in one line: a line feed or carriage return, which some models can write, becomes a space.
std::string one_line(std::string text) {
  for (char& letter : text) {
    if (letter == '\n' || letter == '\r') letter = ' ';
  }
  return text;
}

/// The outputs of a line as JSON, or in Marian's format.
std::string shown(std::uint64_t line_number, const std::vector<tformer::Output>& outputs,
                  const tformer::Translator& translator, bool as_json) {
  if (as_json) return json(outputs[0], {outputs.begin() + 1, outputs.end()});
  std::string text;
  for (const tformer::Output& each : outputs) {
    if (&each != &outputs[0]) text += '\n';
    char score[40];
    std::snprintf(score, sizeof score, "%.6f", each.score);
    const std::string own = one_line(each.text);
    text += translator.n_best() > 1 ? std::to_string(line_number) + " ||| " + own + " ||| " + score : own;
    if (!translator.aligns()) continue;
    text += " |||";
    for (std::size_t i = 0; i < each.alignment.size(); ++i) {
      text += " " + std::to_string(each.alignment[i]) + "-" + std::to_string(i);
    }
    if (each.alignment.empty()) text += " ";
  }
  return text;
}

/// Print, or fail if standard output is closed.
void print(const std::string& text) {
  std::cout << text;
  if (!std::cout) throw Failed("standard output cannot be written: is the disk full, or the pipe closed?");
}

void print_scores(tformer::Translator& translator, const std::vector<std::string>& lines, std::uint64_t first) {
  std::vector<std::string> sources, targets;
  for (const std::string& line : lines) {
    const std::size_t tab = line.find('\t');
    if (tab == std::string::npos) break;
    sources.push_back(line.substr(0, tab));
    targets.push_back(line.substr(tab + 1));
  }
  std::vector<std::vector<double>> found;
  const tformer_status status = translator.score_to(found, sources, targets, first);
  for (const std::vector<double>& scores : found) print(list(scores, number) + "\n");
  tformer::check(status);
  if (sources.size() < lines.size()) {
    throw Failed(input_line(first + sources.size() + 1) + "has no tab: give SOURCE tab TARGET");
  }
}

void print_stream(tformer::Translator& translator, const std::vector<std::string>& lines,
                  const std::vector<std::string>& begins, std::uint64_t first) {
  const auto write = [](const std::string& piece) { return static_cast<bool>(std::cout << one_line(piece) << std::flush); };
  for (std::size_t i = 0; i < lines.size(); ++i) {
    translator.stream(lines[i], write, begins.empty() ? "" : begins[i], first + i);
    print("\n");
  }
}

/// Print the outputs of the lines before the first bad one, then throw its error. Returns how many were cut off.
std::size_t print_outputs(tformer::Translator& translator, const std::vector<std::string>& lines,
                          const std::vector<std::string>& begins, std::uint64_t first, const CommandLine& line) {
  tformer::Outputs found;
  tformer_status status = TFORMER_OK;
  std::exception_ptr bad;
  if (line.ids) {
    std::vector<std::vector<std::int32_t>> ids;
    try {
      for (const std::string& each : lines) ids.push_back(parse_ids(each, first + ids.size() + 1));
    } catch (const Failed&) {
      bad = std::current_exception();
    }
    status = translator.generate_to(found, ids, first);
  } else {
    status = translator.translate_to(found, lines, begins, first);
  }
  std::size_t cut = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    print(shown(first + i, found[i], translator, line.json) + "\n");
    cut += !found[i][0].finished;
  }
  tformer::check(status);
  if (bad) std::rethrow_exception(bad);
  return cut;
}

/// The prefixes of some lines.
std::vector<std::string> begins_of(const std::vector<std::string>& prefixes, const CommandLine& line, std::size_t first,
                                   std::size_t count) {
  if (!line.prefix_file) return {};
  if (prefixes.size() < first + count) {
    throw Failed(*line.prefix_file + " has " + std::to_string(prefixes.size()) +
                 " lines, the input more: give one a line, empty for none");
  }
  const auto from = prefixes.begin() + static_cast<std::ptrdiff_t>(first);
  return {from, from + static_cast<std::ptrdiff_t>(count)};
}

/// Turn vocabulary entries into ids for their decoding options.
void add_entries(const tformer::Model& model, CommandLine& line) {
  std::map<std::string, std::string> ids;
  for (const auto& [name, entry] : line.entries) {
    std::string& own = ids[name];
    own += (own.empty() ? "" : ",") + std::to_string(model.target_entry(entry));
  }
  line.translator.insert(line.translator.end(), ids.begin(), ids.end());
}

/// Have glibc map blocks from this size on separately, so that they return to the system when freed.
void map_blocks_from([[maybe_unused]] int bytes) {
#ifdef M_MMAP_THRESHOLD
  ::mallopt(M_MMAP_THRESHOLD, bytes);
#endif
}

int translate(CommandLine line) {
  Windows windows(line.stream ? 1 : line.window_tokens * window_bytes, line.max_line_bytes);
  std::vector<std::string> prefixes, allowed;
  if (line.prefix_file) prefixes = read_lines(*line.prefix_file);
  if (line.allowed_file) allowed = read_lines(*line.allowed_file);
  if (line.allowed_file && allowed.empty()) {
    throw Failed(*line.allowed_file + " has no line: give each output that is allowed");
  }
  std::vector<std::string> lines = windows.next();
  const auto cores = static_cast<long>(tformer::cores());
  const bool enough = line.backend != "trt" && static_cast<long>(lines.size()) >= lines_each * cores;
  const std::string workers = std::to_string(line.workers ? line.workers : enough ? cores : 1);
  line.model.emplace_back("workers", workers);
  line.translator.emplace_back("workers", workers);
  map_blocks_from(128 * 1024);  // else the heap keeps what ONNX Runtime frees while it opens a model
  const tformer::Model model(line.bundle, line.model);
  map_blocks_from(32 * 1024 * 1024);  // else each copy of a long text is mapped
  add_entries(model, line);
  tformer::Translator translator(model, line.translator);
  if (!allowed.empty()) translator.allow(allowed);
  std::size_t first = 0, cut = 0;
  for (; !lines.empty(); lines = windows.next()) {
    const std::vector<std::string> begins = begins_of(prefixes, line, first, lines.size());
    if (line.score) print_scores(translator, lines, first);
    else if (line.stream) print_stream(translator, lines, begins, first);
    else cut += print_outputs(translator, lines, begins, first, line);
    std::cout.flush();
    first += lines.size();
  }
  if (!windows.problem.empty()) throw Failed(windows.problem);
  if (line.prefix_file && prefixes.size() != first) {
    throw Failed(*line.prefix_file + " has " + std::to_string(prefixes.size()) + " lines, the input " +
                 std::to_string(first) + ": give one a line");
  }
  std::cout.flush();
  if (!std::cout) throw Failed("standard output cannot be written: is the disk full, or the pipe closed?");
  if (!model.warning().empty()) std::cerr << "warning: " << model.warning() << '\n';
  if (cut) std::cerr << cut << " outputs were cut off at a limit\n";
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  std::ios::sync_with_stdio(false);
  try {
    const CommandLine line = parse_command_line({arguments + 1, arguments + count});
    if (line.help) std::cout << help_text;
    if (line.version) std::cout << "tformer " << tformer::version() << '\n';
    return line.help || line.version ? 0 : translate(line);
  } catch (const UsageError& error) {
    std::cerr << "tformer-cpp: " << error.what() << "; tformer-cpp --help shows the options\n";
    return 2;
  } catch (const std::exception& error) {
    std::cout.flush();
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
