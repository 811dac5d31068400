# Included by toolchain files whose compiler is zig (pip install ziglang), which has the C libraries of many systems in it.
set(TFORMER_ZIG ON)
set(TFORMER_STATIC OFF) # whose users would need zig's libc++
set(CMAKE_C_COMPILER zig cc -target ${zig_target})
set(CMAKE_CXX_COMPILER zig c++ -target ${zig_target})
set(CMAKE_C_FLAGS_INIT -g0) # zig's own default is -g
set(CMAKE_CXX_FLAGS_INIT -g0)
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT -s)
endforeach()
set(CMAKE_STRIP true CACHE STRING "A program that does nothing: files are linked without symbols") # strip may be for another processor
foreach(language C CXX)
  set(CMAKE_${language}_ARCHIVE_CREATE "zig ar qc <TARGET> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_APPEND "zig ar q <TARGET> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_FINISH "zig ranlib <TARGET>")
endforeach()
