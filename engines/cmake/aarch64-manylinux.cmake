# Toolchain for what is released for aarch64: any Linux with glibc 2.28 or later. Its libstdc++ is not needed: libc++ is linked.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(TFORMER_TARGET aarch64-manylinux)
set(zig_target aarch64-linux-gnu.2.28)
include("${CMAKE_CURRENT_LIST_DIR}/zig.cmake")
