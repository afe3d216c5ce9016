#!/bin/sh
# Builds native/ and runs its tests three ways. Usage: run.sh BUILD_FOLDER [BUILT_FOLDER]
# If BUILT_FOLDER is given, the plain tests call the libraries in it, as they are installed, and build none.
# If AIODATADIST_FLAKY names a file, failed tests run once more, one at a time; those that pass then are added to the file.
set -eu
mkdir -p "$1"
source=$(cd "$(dirname "$0")/.." && pwd)
# gold links two hundred small programs with half the work that ld needs.
linker=
command -v ld.gold >/dev/null && linker=-fuse-ld=gold
for kind in plain address thread; do
    build="$1/$kind"
    sanitize=$kind
    built=
    [ "$kind" = plain ] && sanitize= && built=${2:-}
    # -O1 -g1: most of the time here goes into compiling, and a sanitizer's report needs lines, not variables.
    cmake -S "$source" -B "$build" -G Ninja -DAIODATADIST_SANITIZE="$sanitize" -DAIODATADIST_WERROR=ON -DAIODATADIST_BUILT="$built" \
        -DCMAKE_C_FLAGS_RELWITHDEBINFO="-O1 -g1" -DCMAKE_EXE_LINKER_FLAGS="$linker" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
    cmake --build "$build" >>"$build.log" 2>&1 || { tail -60 "$build.log"; exit 1; }
    # The sanitizers' shadow memory needs addresses that some kernels hand out at random: fix them where that is allowed.
    run=
    [ "$kind" = plain ] || { setarch -R true 2>/dev/null && run="setarch -R"; } || true
    echo "native tests: $kind"
    $run ctest --test-dir "$build" --output-on-failure --no-tests=error -j2 >"$build.log" 2>&1 || {
        cat "$build.log"
        [ -n "${AIODATADIST_FLAKY:-}" ] || exit 1
        $run ctest --test-dir "$build" --output-on-failure --rerun-failed >"$build.again.log" 2>&1 || { cat "$build.again.log"; exit 1; }
        { echo "---- native tests: $kind"; tail -n 200 "$build.log"; } >>"$AIODATADIST_FLAKY"
    }
    tail -n 3 "$build.log"
done
