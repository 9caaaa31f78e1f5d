#!/usr/bin/env bash
# Succeeds if GoogleTest is here, and brings it from Debian's libgtest-dev where it may.
set -euo pipefail

have_gtest() {
  echo '#include <gtest/gtest.h>' | "${CXX:-c++}" -x c++ -E - >/dev/null 2>&1
}

have_gtest && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "GoogleTest is missing: installing libgtest-dev"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y --no-install-recommends libgtest-dev >/dev/null 2>&1 ||
    { apt-get update >/dev/null && apt-get install -y --no-install-recommends libgtest-dev >/dev/null; } ||
    echo "apt-get could not install libgtest-dev"
fi
have_gtest
