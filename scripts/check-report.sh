#!/usr/bin/env bash
# usage: check-report.sh FILE.html [OUT_DIR]
# Opens a report in headless Chromium without a network, at the width of a desk and of a phone, light and dark; fails on
# console errors, on plots without a size and on pages wider than the window. Screenshots are left in OUT_DIR.
set -euo pipefail
. "$(dirname "$0")/env.sh"
file=$(realpath "${1:?usage: check-report.sh FILE.html [OUT_DIR]}")
out=${2:-$MERIDIAN_ROOT/target/report}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
  die "chromium not found (Debian: apt-get install chromium)"
mkdir -p "$out"
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
# Every name resolves to nothing, so whatever the report asked for would be an error on the console.
chrome() {
  "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$profile" --no-first-run \
    --host-resolver-rules="MAP * ~NOTFOUND" --enable-logging=stderr --v=0 --virtual-time-budget=5000 "$@" 2>"$profile/log"
}
# The report forbids scripts, so it is measured in a frame of a page that may read it.
measure() {
  cat > "$profile/measure.html" <<HTML
<!DOCTYPE html><iframe id=f src="file://$file" style="width:$1px;height:800px;border:0"></iframe>
<script>onload=()=>{const d=f.contentDocument;const s=[...d.querySelectorAll("svg")].map(e=>e.getBoundingClientRect());
document.body.dataset.found=[s.length,s.filter(r=>r.width>0&&r.height>0).length,d.documentElement.scrollWidth].join(" ")}</script>
HTML
  chrome --allow-file-access-from-files --dump-dom "file://$profile/measure.html" |
    sed -n 's/.*data-found="\([0-9 ]*\)".*/\1/p'
}
for width in 1280 400; do
  read -r plots sized wide <<< "$(measure "$width")" || true
  [ "${plots:-0}" -gt 0 ] || die "$width px: no plots were rendered"
  [ "$plots" = "$sized" ] || die "$width px: only $sized of $plots plots have a size"
  [ "$wide" -le "$width" ] || die "$width px: the page is $wide px wide"
  for scheme in light dark; do
    dark=$([ $scheme = dark ] && echo --blink-settings=preferredColorScheme=0 || true)
    # A headless window is no narrower than 500 px, so the phone is a frame too.
    cat > "$profile/frame.html" <<HTML
<!DOCTYPE html><meta name="color-scheme" content="light dark"><body style="margin:0">
<iframe src="file://$file" style="width:${width}px;height:6000px;border:0;display:block"></iframe>
HTML
    chrome ${dark:+"$dark"} --window-size="$width,6000" --screenshot="$out/$width-$scheme.png" "file://$profile/frame.html"
    if grep -q 'CONSOLE' "$profile/log"; then grep 'CONSOLE' "$profile/log" >&2; die "$width px, $scheme: console errors"; fi
  done
  say "$width px: $plots plots, no console errors"
done
say "screenshots: $out"
