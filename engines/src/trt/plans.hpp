// The plans in a bundle: what each was compiled for, and which one fits a host and a request.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "limits.hpp"

namespace tformer {

/// Precisions in the order in which plans are looked for.
const std::vector<std::string>& precisions();

constexpr std::uintmax_t largest_plan = std::uintmax_t{1} << 40;  ///< bytes

/// What the plans of a folder were compiled for.
struct Stamp {
  std::string capability;  ///< of the GPU, such as sm90, or sm80+ for a plan that runs on every one from there on
  std::string tensorrt;    ///< flavor and version, such as TensorRT 11.4.0
  std::string precision;

  std::string shown() const { return capability + ", " + tensorrt + ", " + precision; }
  /// Name of the folder under `plans`.
  std::string folder() const;
};

/// An opened and verified folder of plans. Immutable.
class Plans {
 public:
  /// Open the plans of a stamp and verify their hashes. Throws Error.
  Plans(const Bundle& bundle, const std::string& variant, const Stamp& wanted);
  /// The first of several stamps that the bundle has. Throws Error that names what there is and what is needed.
  static std::size_t first(const Bundle& bundle, const std::string& variant, const std::vector<Stamp>& wanted);

  const Stamp& stamp() const { return stamp_; }
  /// Smallest first.
  const std::vector<Profile>& profiles() const { return profiles_; }
  /// The file of one plan, for messages.
  std::filesystem::path plan(const std::string& graph, const Profile& profile) const;
  /// Its content. Throws Error.
  Content read(const std::string& graph, const Profile& profile) const;
  /// The profile with the fewest rows, then the shortest, that fits a request. Throws Error.
  const Profile& fitting(const Profile& wanted) const;
  /// The command that builds these plans and one more profile.
  std::string build_command(const std::string& profile) const;

 private:
  Plans(const Bundle& bundle, const std::string& variant, const Folder& directory);
  void verify(const std::string& name) const;

  std::filesystem::path bundle_;
  Folder directory_;
  Json hashes_;  ///< of files; null: they are not compared
  Stamp stamp_;
  std::vector<Profile> profiles_;
};

}  // namespace tformer
