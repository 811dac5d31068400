#include "shortlist.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>

#include "bundle/bundle.hpp"
#include "bundle/sha256.hpp"
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

}  // namespace

ShortlistParts unpacked(const std::string& content) {
  if (content.size() < header_size || content.compare(0, magic_bytes, magic) != 0) {
    throw std::invalid_argument("it is no file of lists of version 1");
  }
  ShortlistParts parts;
  parts.sources = number_at<std::uint32_t>(content, 20);
  parts.vocab = number_at<std::uint32_t>(content, 24);
  const std::size_t every = number_at<std::uint32_t>(content, 28);
  const std::uint64_t own = number_at<std::uint64_t>(content, 32);
  parts.tokenizers = hex(content.substr(40, 2 * digest_bytes));
  const std::uint64_t sources = parts.sources, tokens = every + own;
  const std::uint64_t expected = header_size + 8 * (sources + 1) + 4 * tokens;
  if (own > most_bytes || content.size() != expected) {
    throw std::invalid_argument("it has " + std::to_string(content.size()) + " bytes, not " + std::to_string(expected));
  }
  std::size_t place = header_size;
  parts.offsets = array_at<std::int64_t>(content, place, parts.sources + 1);
  parts.always = array_at<std::int32_t>(content, place, every);
  parts.targets = array_at<std::int32_t>(content, place, static_cast<std::size_t>(own));
  return parts;
}

Shortlist::Shortlist(ShortlistParts parts) : parts_(std::move(parts)) {
  const std::vector<std::int64_t>& offsets = parts_.offsets;
  const auto own = static_cast<std::int64_t>(parts_.targets.size());
  if (offsets.empty() || offsets.back() != own) {
    throw std::invalid_argument("it has " + std::to_string(own) + " tokens, not " +
                                std::to_string(offsets.empty() ? 0 : offsets.back()));
  }
  if (parts_.always.empty()) throw std::invalid_argument("it has no token that is in every list");
  for (const auto* tokens : {&parts_.always, &parts_.targets}) {
    for (const std::int32_t token : *tokens) {
      if (token < 0 || static_cast<std::size_t>(token) >= parts_.vocab) {
        throw std::invalid_argument("a token is outside the vocabulary of " + std::to_string(parts_.vocab));
      }
    }
  }
  if (offsets.front() != 0 || !std::is_sorted(offsets.begin(), offsets.end())) {
    throw std::invalid_argument("its lists overlap or are too long");
  }
}

void Shortlist::allow(const std::int32_t* source, std::size_t length, std::uint8_t* allowed) const {
  for (const std::int32_t token : parts_.always) allowed[token] = 1;
  for (std::size_t i = 0; i < length; ++i) {
    const auto place = static_cast<std::size_t>(source[i]);
    for (std::int64_t at = parts_.offsets[place]; at < parts_.offsets[place + 1]; ++at) {
      allowed[parts_.targets[static_cast<std::size_t>(at)]] = 1;
    }
  }
}

Lists lists_of(const Shortlist& shortlist, const std::vector<std::int32_t>& src_ids,
               const std::vector<std::int32_t>& lengths, const std::vector<std::vector<std::int32_t>>& required) {
  const std::size_t vocab = shortlist.parts().vocab, batch = lengths.size(), width = src_ids.size() / batch;
  std::vector<std::uint8_t> allowed(batch * vocab, 0), any(vocab, 0);
  for (std::size_t b = 0; b < batch; ++b) {
    std::uint8_t* own = &allowed[b * vocab];
    shortlist.allow(&src_ids[b * width], static_cast<std::size_t>(lengths[b]), own);
    if (b < required.size()) {
      for (const std::int32_t id : required[b]) own[id] = 1;
    }
    for (std::size_t id = 0; id < vocab; ++id) any[id] |= own[id];
  }
  Lists found;
  found.places.resize(batch);
  for (std::size_t id = 0; id < vocab; ++id) {
    if (!any[id]) continue;
    for (std::size_t b = 0; b < batch; ++b) {
      if (allowed[b * vocab + id]) found.places[b].push_back(static_cast<std::int32_t>(found.ids.size()));
    }
    found.ids.push_back(static_cast<std::int32_t>(id));
  }
  return found;
}

namespace {

/// SHA-256 of the source's and of the target's tokenizer file.
std::string side_hashes(const Bundle& bundle) {
  std::string hashes;
  for (const char* side : {"source", "target"}) {
    const std::string file = bundle.manifest()["tokenizer"][side]["file"];
    hashes += bundle.manifest()["files"][file].get<std::string>();
  }
  return hashes;
}

}  // namespace

Shortlist open_shortlist(const Bundle& bundle, const std::string& variant) {
  const std::string folder = bundle.directory().string();
  const Json& manifest = bundle.manifest();
  if (!manifest.contains("shortlist")) {
    throw Error(Status::usage, folder + " has no shortlist: tformer shortlist " + folder + " --src FILE --tgt FILE");
  }
  const bool graphs = bundle.lists("short_rows", variant) && bundle.lists("short_step", variant);
  if (!graphs && bundle.recipe(variant).target != "native") {  // whose programs need none
    throw Error(Status::usage,
                "variant " + variant + " of " + folder +
                    " has no graphs for shortlists: leave the shortlist out");
  }
  const std::string name = manifest["shortlist"]["file"], path = (bundle.directory().path() / name).string();
  bundle.verify({name});
  try {
    const std::string content = read_bytes(bundle.directory(), name, most_bytes), ours = side_hashes(bundle);
    Shortlist found(unpacked(content));
    const ShortlistParts& parts = found.parts();
    const Model& model = bundle.model();
    if (parts.tokenizers != ours || parts.sources != static_cast<std::size_t>(model.src_vocab) ||
        parts.vocab != static_cast<std::size_t>(model.tgt_vocab)) {
      throw Error(Status::bundle,
                  path + " is of another bundle's tokenizers: make it again with tformer shortlist");
    }
    return found;
  } catch (const std::invalid_argument& error) {
    throw Error(Status::bundle, path + " is damaged (" + error.what() + "): make it again with tformer shortlist");
  }
}

}  // namespace tformer
