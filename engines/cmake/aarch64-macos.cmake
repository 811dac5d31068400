# Toolchain to see whether the sources compile for macOS, by make cpp-compiles; nothing of it is supported.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(TFORMER_TARGET aarch64-macos)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY) # nothing is linked
set(zig_target aarch64-macos)
include("${CMAKE_CURRENT_LIST_DIR}/zig.cmake")
