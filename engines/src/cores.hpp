// How many CPUs this process may use.
#pragma once

#include <filesystem>

namespace tformer {

/// CPUs of its affinity, or what its quota is worth.
int cores();

/// What the quotas of the process's control groups are worth in CPUs, rounded up; 0: there is none. Under `root` lie the
/// files of the kernel. Source: Linux, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
int quota(const std::filesystem::path& root = "/");

}  // namespace tformer
