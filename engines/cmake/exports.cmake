# A shared library exports what symbols.map lists, and keeps nothing that is not reached from there. Windows exports what is
# declared so (TFORMER_API).
function(export_only target map)
  if(WIN32)
    return()
  elseif(APPLE)
    file(STRINGS "${map}" names REGEX "global:")
    string(REGEX REPLACE ".*global: *([^;]+);.*" "_\\1" names "${names}")
    target_link_options(${target} PRIVATE "LINKER:-exported_symbol,${names}" LINKER:-dead_strip)
  else()
    target_link_options(${target} PRIVATE "LINKER:--version-script=${map}" LINKER:--gc-sections LINKER:--as-needed)
  endif()
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${map}")
endfunction()
