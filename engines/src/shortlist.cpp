#include "shortlist.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "bundle/bundle.hpp"
#include "errors.hpp"

namespace tformer {
namespace {

constexpr const char magic[] = "tformer shortlist 1\n";
constexpr std::size_t magic_bytes = sizeof magic - 1, header_size = 128, digest_bytes = 32;
constexpr std::uintmax_t most_bytes = std::uintmax_t{1} << 31;
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bundles are little-endian");

template <typename Number>
Number number_at(const std::string& content, std::size_t place) {
  Number value;
  std::memcpy(&value, content.data() + place, sizeof value);
  return value;
}

template <typename Number>
std::vector<Number> array_at(const std::string& content, std::size_t& place, std::size_t count) {
  std::vector<Number> values(count);
  if (count) std::memcpy(values.data(), content.data() + place, count * sizeof(Number));
  place += count * sizeof(Number);
  return values;
}

std::string hex(const std::string& bytes) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += digits[static_cast<unsigned char>(byte) >> 4];
    text += digits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

}  // namespace

Shortlist::Shortlist(std::string content) {
  if (content.size() < header_size || content.compare(0, magic_bytes, magic) != 0) {
    throw std::invalid_argument("it is no file of lists of version 1");
  }
  sources_ = number_at<std::uint32_t>(content, 20);
  vocab_ = number_at<std::uint32_t>(content, 24);
  const std::size_t every = number_at<std::uint32_t>(content, 28);
  const std::uint64_t own = number_at<std::uint64_t>(content, 32);
  tokenizers_ = hex(content.substr(40, 2 * digest_bytes));
  const std::uint64_t expected = header_size + 8 * (std::uint64_t{sources_} + 1) + 4 * std::uint64_t{every} + 4 * own;
  if (own > most_bytes || content.size() != expected) {
    throw std::invalid_argument("it has " + std::to_string(content.size()) + " bytes, not " + std::to_string(expected));
  }
  std::size_t place = header_size;
  offsets_ = array_at<std::int64_t>(content, place, sources_ + 1);
  always_ = array_at<std::int32_t>(content, place, every);
  targets_ = array_at<std::int32_t>(content, place, static_cast<std::size_t>(own));
  if (offsets_.back() != static_cast<std::int64_t>(own)) {
    throw std::invalid_argument("it has " + std::to_string(own) + " tokens, not " + std::to_string(offsets_.back()));
  }
  if (always_.empty()) throw std::invalid_argument("it has no token that is in every list");
  for (const auto* tokens : {&always_, &targets_}) {
    for (const std::int32_t token : *tokens) {
      if (token < 0 || static_cast<std::size_t>(token) >= vocab_) {
        throw std::invalid_argument("a token is outside the vocabulary of " + std::to_string(vocab_));
      }
    }
  }
  if (offsets_.front() != 0 || !std::is_sorted(offsets_.begin(), offsets_.end())) {
    throw std::invalid_argument("its lists overlap or are too long");
  }
}

void Shortlist::allow(const std::int32_t* source, std::size_t length, std::uint8_t* allowed) const {
  for (const std::int32_t token : always_) allowed[token] = 1;
  for (std::size_t i = 0; i < length; ++i) {
    const auto place = static_cast<std::size_t>(source[i]);
    for (std::int64_t at = offsets_[place]; at < offsets_[place + 1]; ++at) {
      allowed[targets_[static_cast<std::size_t>(at)]] = 1;
    }
  }
}

Shortlist open_shortlist(const Bundle& bundle, const std::string& variant) {
  const std::string folder = bundle.directory().string();
  const Json& manifest = bundle.manifest();
  if (!manifest.contains("shortlist")) {
    throw Error(Status::usage, folder + " has no shortlist: tformer shortlist " + folder + " --src FILE --tgt FILE");
  }
  if (!bundle.lists("short_rows", variant) || !bundle.lists("short_step", variant)) {
    throw Error(Status::usage,
                "variant " + variant + " of " + folder + " has no graphs for shortlists: export it again");
  }
  const std::string name = manifest["shortlist"]["file"], path = (bundle.directory() / name).string();
  if (name.size() > 4 && name.compare(name.size() - 4, 4, ".npz") == 0) {
    throw Error(Status::bundle, path + " is of an older version, which this library does not read: make it again with "
                                       "tformer shortlist");
  }
  bundle.verify({name});
  try {
    Shortlist found(read_bytes(bundle.directory(), name, most_bytes));
    std::string ours;
    for (const char* side : {"source", "target"}) {
      ours += manifest["files"][manifest["tokenizer"][side]["file"].get<std::string>()].get<std::string>();
    }
    const Model& model = bundle.model();
    if (found.tokenizers() != ours || found.sources() != static_cast<std::size_t>(model.src_vocab) ||
        found.vocab() != static_cast<std::size_t>(model.tgt_vocab)) {
      throw Error(Status::bundle,
                  path + " is of another bundle's tokenizers: make it again with tformer shortlist");
    }
    return found;
  } catch (const std::invalid_argument& error) {
    throw Error(Status::bundle, path + " is damaged (" + error.what() + "): make it again with tformer shortlist");
  }
}

}  // namespace tformer
