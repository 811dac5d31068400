# Toolchain for ARM64 Linux: make cpp-cross TARGET=aarch64-linux-gnu. Programs, such as tests, run by qemu-user.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(TFORMER_TARGET aarch64-linux-gnu)
set(CMAKE_C_COMPILER ${TFORMER_TARGET}-gcc)
set(CMAKE_CXX_COMPILER ${TFORMER_TARGET}-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu max -L /usr/${TFORMER_TARGET})
