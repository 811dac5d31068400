// How many CPUs this process may use.
#pragma once

#include <filesystem>

namespace tformer {

/// CPUs of the process's affinity mask, limited by its cgroup quota.
int cores();

/// The CPU quota of the process's control groups in CPUs, rounded up; 0: none is set. Under `root` lie the
/// files of the kernel. Source: Linux, Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst.
int quota(const std::filesystem::path& root = "/");

}  // namespace tformer
