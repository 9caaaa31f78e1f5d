#!/usr/bin/env bash
# Succeeds if GoogleTest is installed. As root, installs it first where apt-get can.
set -euo pipefail

have_gtest() {
  echo '#include <gtest/gtest.h>' | "${CXX:-c++}" -x c++ -E - >/dev/null 2>&1
}

have_gtest && exit 0
if ! command -v apt-get >/dev/null; then
  echo "GoogleTest is missing. Install it with your package manager to run the C++ tests." >&2
elif [ "$(id -u)" != 0 ]; then
  echo "GoogleTest is missing. Install it with: sudo apt-get install libgtest-dev" >&2
else
  echo "GoogleTest is missing. Installing libgtest-dev with apt-get." >&2
  export DEBIAN_FRONTEND=noninteractive
  install=(apt-get install -y --no-install-recommends libgtest-dev)
  "${install[@]}" >/dev/null 2>&1 || { apt-get update >/dev/null && "${install[@]}" >/dev/null; } ||
    echo "apt-get could not install libgtest-dev." >&2
fi
have_gtest
