# Toolchain to see whether the sources compile for Windows, by make cpp-compiles; nothing of it is supported.
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(TFORMER_TARGET x86_64-windows)
set(zig_target x86_64-windows-gnu)
include("${CMAKE_CURRENT_LIST_DIR}/zig.cmake")
