# Translates PTX to C++.
set(fsdp_translator ${CMAKE_CURRENT_LIST_DIR}/translate_ptx.py)

# Adds the command that writes the C++ file from the PTX files that follow it.
function(fsdp_translate_ptx translation)
  add_custom_command(OUTPUT ${translation}
    COMMAND ${Python_EXECUTABLE} ${fsdp_translator} ${translation} ${ARGN}
    DEPENDS ${fsdp_translator} ${ARGN} VERBATIM)
endfunction()
