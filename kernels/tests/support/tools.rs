//! What the project's scripts get for tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// What a script of the project prints.
pub fn script(name: &str, arguments: &[&str]) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts").join(name);
    let output =
        Command::new(&path).args(arguments).output().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(output.status.success(), "{}: {}", path.display(), String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).expect("a path").trim_end())
}

/// The compilers of CUDA.
pub fn cuda_home() -> &'static Path {
    static HOME: OnceLock<PathBuf> = OnceLock::new();
    HOME.get_or_init(|| script("fetch.sh", &["cuda"]))
}
