# Programs for sanitizers, and the list of what the library exports.
foreach(program threads no_memory)
  add_executable(${program} tests/${program}.cpp)
  target_link_libraries(${program} PRIVATE tformer::tformer Threads::Threads ${CMAKE_DL_LIBS})
endforeach()

# Programs over what the library does not export; overhead is driven by benchmarks/cpp.py. step_speed is a profile.
foreach(program fuzz overhead step_speed)
  add_executable(${program} tests/${program}.cpp)
  target_link_libraries(${program} PRIVATE tformer_options tformer_all)
endforeach()

if(BUILD_SHARED_LIBS)
  add_test(NAME exported_symbols COMMAND "${CMAKE_COMMAND}" "-DLIBRARY=$<TARGET_FILE:tformer>"
           "-DLIST=${PROJECT_SOURCE_DIR}/symbols.txt" "-DNM=${CMAKE_NM}" -P "${PROJECT_SOURCE_DIR}/tests/symbols.cmake")
endif()
if(TFORMER_SANITIZE MATCHES fuzzer) # of clang, whose libFuzzer has its own main
  target_compile_definitions(fuzz PRIVATE TFORMER_LIBFUZZER)
  target_link_options(fuzz PRIVATE -fsanitize=fuzzer)
else()
  add_test(NAME fuzz COMMAND fuzz "${PROJECT_SOURCE_DIR}/../tests/bundles" 5)
endif()
