#include "cores.hpp"

#include <algorithm>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "system.hpp"

namespace fs = std::filesystem;

namespace tformer {
namespace {

/// The first numbers of a file; false where it has none, as for "max".
template <class... Numbers>
bool read(const fs::path& path, Numbers&... numbers) {
  std::ifstream file(path);
  return static_cast<bool>((file >> ... >> numbers));
}

/// The quota of one control group, of either version.
int quota_of(const fs::path& group) {
  long long quota = 0, period = 0;
  const bool found = read(group / "cpu.max", quota, period) ||
                     (read(group / "cpu.cfs_quota_us", quota) && read(group / "cpu.cfs_period_us", period));
  if (!found || quota < 0 || period <= 0) return 0;
  return static_cast<int>(std::clamp<long long>(quota / period + (quota % period != 0), 1, 1 << 20));
}

}  // namespace

int quota(const fs::path& root) {
  int least = 0;
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // NUMBER:CONTROLLERS:PATH
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool own = controllers.find(",cpu,") != std::string::npos;
    if (!own && line.compare(0, first, "0") != 0) continue;
    fs::path group = root / "sys/fs/cgroup" / (own ? "cpu" : "");
    std::vector<fs::path> groups{group};
    for (const fs::path& part : fs::path(line.substr(second + 1)).relative_path()) groups.push_back(group /= part);
    for (const fs::path& each : groups) {
      if (const int found = quota_of(each)) least = least ? std::min(least, found) : found;
    }
  }
  return least;
}

int cores() {
  const int known = system::cores(), most = quota();
  const int all = known ? known : static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, most ? std::min(all, most) : all);
}

}  // namespace tformer
