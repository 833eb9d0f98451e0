#!/usr/bin/env bash
# Builds the book with mdBook, then looks every link up: in the book's sources, and in the pages that were built.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
lychee=$(scripts/fetch.sh check)/bin/lychee
mdbook=$(scripts/fetch.sh mdbook)
"$mdbook" build docs -d "$MERIDIAN_ROOT/target/book" 2>&1 | { grep -E "WARN|ERROR" >&2 && exit 1 || true; }
for page in $(cd docs/src && git ls-files '*.md'); do
  [ "$page" = SUMMARY.md ] || [ -e "target/book/${page%.md}.html" ] || die "docs/src/$page: not in SUMMARY.md"
done
mapfile -t sources < <(git ls-files '*.md')
"$lychee" --offline --no-progress --quiet --include-fragments --root-dir "$MERIDIAN_ROOT" "${sources[@]}" >&2
"$lychee" --offline --no-progress --quiet --include-fragments --root-dir "$MERIDIAN_ROOT/target/book" --exclude-path print.html 'target/book/**/*.html' >&2
python3 scripts/check_commands.py
