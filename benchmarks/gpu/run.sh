#!/bin/sh
# Starts the kit with a Python of the host, or with the one that a kit for TensorRT 8.6 brings. docs/gpu.md says more.
here=$(cd "$(dirname "$0")" && pwd)
work=${KIT_WORK:-$here/work}
enough='import lzma, sys; sys.exit(sys.version_info < (3, 8))'

start() {  # start PYTHON ARGUMENT...
  python=$1
  shift
  if "$python" -c "$enough" 2> /dev/null; then exec "$python" "$here/runner/run.py" "$@"; fi
}

start "${KIT_PYTHON:-python3}" "$@"
start python3 "$@"
if [ -n "${KIT_INSTALLED:-}" ]; then start "$KIT_INSTALLED" "$@"; fi
if [ ! -e "$work/python" ] && (cd "$here" && grep ' python\.tar' SHA256SUMS | sha256sum --check --status) 2> /dev/null; then
  rm -rf "$work/.part"
  mkdir -p "$work/.part" && cat "$here"/python.tar.* | tar -x -C "$work/.part" && mv "$work/.part/python" "$work/python"
fi
for each in "$work"/python/usr/bin/python3*; do start "$each" "$@"; done
echo 'error: there is no Python 3.8 or later with lzma: name one in KIT_PYTHON' >&2
exit 1
