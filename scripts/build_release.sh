#!/usr/bin/env bash
# Builds sdist and wheel of the last commit into a folder:  build_release.sh FOLDER
#
# Everything is built twice, from two clean copies, and compared byte by byte. The wheel is built from the sdist. Every file
# has the time of the commit. PYTHON (python3) must be able to install `build` from a package index.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -eq 1 ]] || { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 2; }
target=$1
commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct "$commit")}
export SOURCE_DATE_EPOCH CI=true
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt build
for copy in one two; do
  mkdir "$work/$copy"
  git archive "$commit" | tar -x -C "$work/$copy"
  "$work/tools/bin/python" -m build --outdir "$work/$copy.dist" "$work/$copy" >"$work/$copy.log" 2>&1 ||
    { tail -n 40 "$work/$copy.log" >&2; exit 1; }
done
diff -r "$work/one.dist" "$work/two.dist" || { printf 'error: two builds of one commit differ\n' >&2; exit 1; }
mkdir -p "$target"
cp "$work"/one.dist/* "$target/"
cd "$target"
sha256sum -- *.whl *.tar.gz
