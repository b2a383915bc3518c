#!/usr/bin/env bash
# Provide a Chromium for the tests of the report page: the one on PATH, $CHROMIUM, or Debian's.
set -euo pipefail

if command -v "${CHROMIUM:-chromium}" >/dev/null; then
    exit 0
fi
[ -z "${CHROMIUM:-}" ] || { echo "error: CHROMIUM is $CHROMIUM, which is not a program: correct or unset it" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "error: no chromium on PATH: install it, or set CHROMIUM to a Chromium-based browser" >&2; exit 1; }
SUDO=$([ "$(id -u)" = 0 ] || echo sudo)
echo "installing chromium"
$SUDO apt-get update -qq
DEBIAN_FRONTEND=noninteractive $SUDO apt-get install -y -qq --no-install-recommends chromium >/dev/null
command -v chromium >/dev/null || { echo "error: apt-get installed no chromium: set CHROMIUM to a Chromium-based browser" >&2; exit 1; }
