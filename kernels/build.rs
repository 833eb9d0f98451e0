//! Writes the C header, and compiles the CUDA kernels ahead where a compiler for them is there.

use std::env;
use std::path::PathBuf;

#[path = "build/ptx.rs"]
mod ptx;

/// Where the C ABI is, and the structs of it that are Rust's as well. All that is public and C's in these is in the header,
/// constants of the structs too.
const SOURCES: [&str; 3] = ["src/ffi.rs", "src/ffi/failure.rs", "src/rows.rs"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    header();
    target();
    ptx::build();
}

/// `OUT_DIR/meridian_kernels.h`, which a test compares with the one in `include/`.
fn header() {
    println!("cargo::rerun-if-changed=cbindgen.toml");
    let config = cbindgen::Config::from_file("cbindgen.toml").expect("cbindgen.toml is one");
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        println!("cargo::rerun-if-changed={source}");
        builder = builder.with_src(source);
    }
    let header = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("meridian_kernels.h");
    builder.generate().expect("the C ABI can be said in C").write_to_file(header);
}

/// The target, for the tests that call its C compiler.
fn target() {
    println!("cargo::rustc-env=MERIDIAN_TARGET={}", env::var("TARGET").expect("cargo sets it"));
}
