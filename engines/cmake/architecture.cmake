# Refuses static libraries that were built for another processor: the linker would only say that it skips them.

# ELF's e_machine, as its two bytes lie in a file. Source: the System V ABI, and its supplements for processors.
set(elf_machine_x86_64 3e00)
set(elf_machine_aarch64 b700)

# The e_machine of the first object of an archive, or of a shared library; empty: none is found.
function(read_machine file result)
  set(${result} "" PARENT_SCOPE)
  set(at 0)
  file(READ "${file}" magic LIMIT 8 HEX)
  if(magic STREQUAL "213c617263683e0a") # "!<arch>\n"
    set(at 8)
    while(TRUE) # past the index and the long names
      file(READ "${file}" header OFFSET ${at} LIMIT 60)
      if(NOT header MATCHES "^/")
        break()
      endif()
      string(SUBSTRING "${header}" 48 10 size)
      string(STRIP "${size}" size)
      math(EXPR member "${at} + 60")
      file(READ "${file}" start OFFSET ${member} LIMIT 4 HEX)
      if(NOT size MATCHES "^[0-9]+$" OR start STREQUAL "7f454c46") # an object with a long name
        break()
      endif()
      math(EXPR at "(${member} + ${size} + 1) / 2 * 2")
    endwhile()
    math(EXPR at "${at} + 60")
  endif()
  file(READ "${file}" object OFFSET ${at} LIMIT 20 HEX)
  if(object MATCHES "^7f454c46")
    string(SUBSTRING "${object}" 36 4 machine)
    set(${result} "${machine}" PARENT_SCOPE)
  endif()
endfunction()

# Stops if one of the libraries, given as names of variables, is for another processor.
function(require_architecture)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
    set(own x86_64)
  elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    set(own aarch64)
  else()
    return()
  endif()
  foreach(variable IN LISTS ARGN)
    read_machine("${${variable}}" found)
    if(found AND NOT found STREQUAL elf_machine_${own})
      set(other "another processor")
      foreach(each x86_64 aarch64)
        if(found STREQUAL elf_machine_${each})
          set(other ${each})
        endif()
      endforeach()
      message(FATAL_ERROR "${${variable}} is a library for ${other}, but this build is for ${own}: "
                          "give CMake -D${variable}=FILE, or fill TFORMER_DEPENDENCIES by get-dependencies FOLDER TARGET")
    endif()
  endforeach()
endfunction()
