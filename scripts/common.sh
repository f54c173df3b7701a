# shellcheck shell=bash
# Sourced by scripts/demo and scripts/test: says what is missing and installs it. Never touches a
# package that is there already, and never asks a question.

step() {
    printf '\n== %s\n' "$*"
}

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# need_packages PACKAGE...: install the Debian packages that are missing. As root through apt-get;
# else the command to run is printed and the script stops.
need_packages() {
    local missing=() p tool
    if ! command -v dpkg-query > /dev/null || ! command -v apt-get > /dev/null; then
        for tool in cmake ninja cc pkg-config; do
            command -v "$tool" > /dev/null || die "$tool is missing. This is not a Debian system; the Debian names of what is needed: $*"
        done
        printf 'Not a Debian system: taking for granted that these are installed: %s\n' "$*"
        return 0
    fi
    for p in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$p" 2> /dev/null || true) == installed ]] || missing+=("$p")
    done
    if ((${#missing[@]} == 0)); then
        printf 'All packages are installed: %s\n' "$*"
        return 0
    fi
    printf 'These packages are missing: %s\n' "${missing[*]}"
    if ((EUID != 0)); then
        printf 'Not root, so nothing was installed. Run this, then start again:\n\n    sudo apt-get update && sudo apt-get install --no-install-recommends -y %s\n\n' "${missing[*]}" >&2
        exit 1
    fi
    printf 'Installing them with apt-get.\n'
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq < /dev/null || die 'apt-get update failed'
    apt-get install --no-install-recommends -y -qq "${missing[@]}" < /dev/null > /dev/null ||
        die "apt-get could not install: ${missing[*]}"
}

# Megabytes free for files under DIR, and of memory that could be used now.
free_disk_mb() {
    df -Pm "$1" | awk 'NR == 2 {print $4}'
}
free_memory_mb() {
    awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo
}

# The packages that the library and the command are built from.
# shellcheck disable=SC2034
BUILD_PACKAGES=(cmake ninja-build gcc libc6-dev pkg-config libjansson-dev libpthreadpool-dev libxxhash-dev)
