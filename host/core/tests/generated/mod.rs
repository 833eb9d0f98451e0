//! Files of the repository that are written from the native tables.

use std::path::Path;

/// Panics unless the file at `path` from the root is what was generated. `MERIDIAN_BLESS=1` rewrites it.
pub fn assert_committed(path: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var_os("MERIDIAN_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&path, generated).expect("can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (committed, generated)) in (1..).zip(committed.lines().zip(generated.lines())) {
        assert_eq!(committed, generated, "line {number} differs; rewrite the file with MERIDIAN_BLESS=1");
    }
    assert_eq!(committed.len(), generated.len(), "the file differs; rewrite it with MERIDIAN_BLESS=1");
}
