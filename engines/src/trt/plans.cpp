#include "trt/plans.hpp"

#include <algorithm>
#include <sstream>
#include <tuple>

#include "bundle/header.hpp"
#include "bundle/schema.hpp"
#include "errors.hpp"

namespace fs = std::filesystem;

namespace tformer {
namespace {

constexpr const char* header_name = "plans.json";
constexpr std::int64_t version = 1;
const std::vector<std::string> graphs = {"encoder", "decoder_step"};

/// Such as 8x4x64x128, which the schema has checked.
Profile parsed(const std::string& text) {
  Profile profile;
  char times = 0;
  std::istringstream(text) >> profile.batch >> times >> profile.beams >> times >> profile.src_len >> times >>
      profile.capacity;
  return profile;
}

std::string plan_file(const std::string& graph, const Profile& profile) {
  return graph + "-" + profile.shown() + ".plan";
}

/// The command names all profiles, as it replaces all plans of its stamp.
std::string build_words(const fs::path& bundle, const std::string& precision, const std::vector<Profile>& profiles) {
  std::string words = "tformer build " + bundle.string() + " --precision " + precision;
  if (precision != "fp32") words += " --src FILE";
  for (const Profile& each : profiles) words += " --profile " + each.shown();
  return words;
}

Folder plans_folder(const Bundle& bundle, const std::string& variant) { return bundle.folder(variant) / "plans"; }

/// The folders of plans, in order, without hidden ones, which a running build writes.
std::vector<fs::path> folders(const fs::path& all) {
  std::vector<fs::path> found;
  std::error_code none;
  std::error_code problem;
  for (fs::directory_iterator it(all, problem), end; !problem && it != end; it.increment(problem)) {
    const bool hidden = it->path().filename().string().front() == '.';
    if (!hidden && fs::is_regular_file(it->path() / header_name, none)) found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

const std::vector<std::string>& precisions() {
  static const std::vector<std::string> all = {"fp16", "bf16", "fp32"};
  return all;
}

std::string Stamp::folder() const {
  std::string name = capability, words;
  if (name.back() == '+') name.replace(name.size() - 1, 1, "-and-up");
  for (const char letter : tensorrt) {
    const char low = letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
    const bool kept = (low >= 'a' && low <= 'z') || (low >= '0' && low <= '9') || low == '.';
    if (kept || words.empty() || words.back() != '-') words += kept ? low : '-';
  }
  return name + "-" + words + "-" + precision;
}

std::size_t Plans::first(const Bundle& bundle, const std::string& variant, const std::vector<Stamp>& wanted) {
  const Folder all = plans_folder(bundle, variant);
  std::error_code none;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const Folder own = all / wanted[i].folder();
    if (own.source() ? exists(own, header_name) : fs::is_regular_file(own.path() / header_name, none)) return i;
  }
  std::string found = all.source() ? "others, if any" : "";  // a source lists no files
  for (const fs::path& folder : all.source() ? std::vector<fs::path>() : folders(all.path())) {
    found += (found.empty() ? "" : "; ") + Plans(bundle, variant, Folder(folder)).stamp().shown();
  }
  throw Error(Status::bundle, bundle.directory().string() + " has no plans for this host (" + wanted[0].shown() +
                                  "), it has " + (found.empty() ? "none at all" : found) + ": run here: " +
                                  build_words(bundle.directory().path(), wanted[0].precision, {}));
}

Plans::Plans(const Bundle& bundle, const std::string& variant, const Stamp& wanted)
    : Plans(bundle, variant, plans_folder(bundle, variant) / wanted.folder()) {}

Plans::Plans(const Bundle& bundle, const std::string& variant, const Folder& directory)
    : bundle_(bundle.directory().path()), directory_(directory) {
  const Json header = read_header(directory, header_name, "plans", {version, version}, plans_schema());
  stamp_ = {header["capability"], header["tensorrt"], header["precision"]};
  if (stamp_.folder() != directory.path().filename()) {
    throw Error(Status::bundle, directory.string() + " has plans for " + stamp_.shown() + ": call it " + stamp_.folder() +
                                    " again, or remove it");
  }
  for (const Json& name : header["profiles"]) profiles_.push_back(parsed(name));
  std::sort(profiles_.begin(), profiles_.end(), [](const Profile& a, const Profile& b) {
    return std::tie(a.batch, a.beams, a.src_len, a.capacity) < std::tie(b.batch, b.beams, b.src_len, b.capacity);
  });
  if (bundle.verified()) hashes_ = header["files"];
  const std::string command = build_words(bundle_, stamp_.precision, profiles_);
  const auto refuse = [&command](const std::string& what) { throw Error(Status::bundle, what + ": " + command); };
  Json own = Json::object();
  for (const std::string& name : bundle.graph_files(graphs, variant)) own[name] = bundle.manifest()["files"][name];
  if (header["graphs"] != own) refuse(directory.string() + " was compiled from other graphs than the bundle's");
  for (const Profile& profile : profiles_) {
    for (const std::string& graph : graphs) {
      const std::string name = plan_file(graph, profile);
      if (!header["files"].contains(name)) {
        refuse((directory.path() / header_name).string() + " is damaged: no hash of " + name);
      }
      if (!directory.source()) verify(name);  // what a source gives is compared whenever it gives it
    }
  }
}

void Plans::verify(const std::string& name) const {
  if (hashes_.is_null()) return;
  try {
    verify_file(directory_, name, hashes_[name], "plans");
  } catch (const Error& error) {
    throw Error(Status::bundle, error.what() + (": " + build_words(bundle_, stamp_.precision, profiles_)));
  }
}

fs::path Plans::plan(const std::string& graph, const Profile& profile) const {
  return directory_.path() / plan_file(graph, profile);
}

Content Plans::read(const std::string& graph, const Profile& profile) const {
  const std::string name = plan_file(graph, profile);
  if (!directory_.source()) return content_of(read_bytes(directory_, name, largest_plan));
  const auto kept = directory_.keep();
  verify(name);
  return content(directory_, name);
}

std::string Plans::build_command(const std::string& profile) const {
  return build_words(bundle_, stamp_.precision, profiles_) + " --profile " + profile;
}

const Profile& Plans::fitting(const Profile& wanted) const {
  const Profile* best = nullptr;
  const auto key = [](const Profile& it) { return std::make_tuple(it.batch * it.beams, it.src_len, it.capacity); };
  for (const Profile& each : profiles_) {
    if (each.holds(wanted) && (!best || key(each) < key(*best))) best = &each;
  }
  if (best) return *best;
  const std::string command = build_command(wanted.shown());
  const std::vector<std::pair<const char*, std::int64_t Profile::*>> sizes = {
      {"batch", &Profile::batch}, {"beams", &Profile::beams}, {"src_len", &Profile::src_len},
      {"capacity", &Profile::capacity}};
  for (const auto& [name, size] : sizes) {
    std::int64_t largest = 0;
    for (const Profile& each : profiles_) largest = std::max(largest, each.*size);
    if (wanted.*size <= largest) continue;
    throw Error(Status::limit, name + (" " + std::to_string(wanted.*size)) + " exceeds the plans' largest, " +
                                   std::to_string(largest) + ": " + command);
  }
  std::string there;
  for (const Profile& each : profiles_) there += (there.empty() ? "" : ", ") + each.shown();
  throw Error(Status::limit, "no plan takes " + wanted.shown() + " (batch, beams, source, target): there are " + there +
                                 ": " + command);
}

}  // namespace tformer
