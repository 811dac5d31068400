# Programs for sanitizers, and the list of what the library exports.
add_executable(threads tests/threads.cpp)
target_link_libraries(threads PRIVATE tformer::tformer Threads::Threads)
target_compile_features(threads PRIVATE cxx_std_17)

# Programs over what the library does not export; overhead is driven by benchmarks/cpp.py.
foreach(program fuzz overhead)
  add_executable(${program} tests/${program}.cpp $<TARGET_OBJECTS:tformer_core> $<TARGET_OBJECTS:tformer_decode>
                 $<TARGET_OBJECTS:tformer_text>)
  target_link_libraries(${program} PRIVATE tformer_options "${SENTENCEPIECE_LIBRARY}" "${PCRE2_LIBRARY}"
                        "${CRYPTO_LIBRARY}" Threads::Threads ${CMAKE_DL_LIBS})
endforeach()

if(BUILD_SHARED_LIBS)
  add_test(NAME exported_symbols COMMAND "${CMAKE_COMMAND}" "-DLIBRARY=$<TARGET_FILE:tformer>"
           "-DLIST=${PROJECT_SOURCE_DIR}/symbols.txt" "-DNM=${CMAKE_NM}" -P "${PROJECT_SOURCE_DIR}/tests/symbols.cmake")
endif()
add_test(NAME fuzz COMMAND fuzz "${PROJECT_SOURCE_DIR}/../tests/bundles" 5)
