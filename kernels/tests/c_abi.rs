//! The C ABI, from a C program and the same as C++, and its header.
#![cfg(target_pointer_width = "64")]

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::path::{Path, PathBuf};
use std::process::Command;

const GENERATED: &str = include_str!(concat!(env!("OUT_DIR"), "/meridian_kernels.h"));
const PROGRAM: &str = include_str!("c/entropy.c");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of the library that cargo built for this test: beside it, or near.
fn library() -> PathBuf {
    let name = format!("{DLL_PREFIX}meridian_kernels{DLL_SUFFIX}");
    let test = std::env::current_exe().expect("a test has a file");
    let folders = test.ancestors().skip(1).take(4).flat_map(|folder| [folder.to_owned(), folder.join("deps")]);
    folders.into_iter().find(|folder| folder.join(&name).is_file()).expect("cargo builds the library for its tests")
}

fn compile_and_run(is_cpp: bool) {
    let (standard, name) = if is_cpp { ("-std=c++17", "entropy-cpp") } else { ("-std=c11", "entropy-c") };
    let target = env!("MERIDIAN_TARGET");
    let compiler = cc::Build::new().cpp(is_cpp).target(target).host(target).opt_level(1).debug(false).get_compiler();
    let (library, program) = (library(), Path::new(env!("CARGO_TARGET_TMPDIR")).join(name));
    let mut command: Command = compiler.to_command();
    command.args(["-Wall", "-Wextra", "-pedantic", "-Werror", standard]);
    command.args(["-x", if is_cpp { "c++" } else { "c" }]).arg(root().join("tests/c/entropy.c"));
    command.arg("-I").arg(root().join("include")).arg("-o").arg(&program);
    command.arg("-L").arg(&library).args(["-lmeridian_kernels", "-lm"]);
    command.arg(format!("-Wl,-rpath,{}", library.display()));
    let compiled = command.output().expect("a C and a C++ compiler are there");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let ran = Command::new(&program).output().expect("it was compiled");
    assert!(ran.status.success(), "{}:\n{}", ran.status, String::from_utf8_lossy(&ran.stdout));
}

#[test]
fn a_program_in_c() {
    compile_and_run(false);
}

#[test]
fn the_same_program_in_cpp() {
    compile_and_run(true);
}

#[test]
fn the_committed_header_is_the_generated_one() {
    let path = root().join("include/meridian_kernels.h");
    if std::env::var_os("MERIDIAN_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&path, GENERATED).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (committed, generated)) in (1..).zip(committed.lines().zip(GENERATED.lines())) {
        assert_eq!(committed, generated, "line {number} differs; rewrite the header with MERIDIAN_BLESS=1");
    }
    assert_eq!(committed.len(), GENERATED.len(), "the header differs; rewrite it with MERIDIAN_BLESS=1");
}

#[test]
fn the_example_in_the_documentation_is_the_one_that_runs() {
    let page = std::fs::read_to_string(root().join("README.md")).expect("the page is there");
    let example = PROGRAM.split_once("// [example]\n").and_then(|(_, rest)| rest.split_once("// [/example]"));
    let (example, _) = example.expect("the program has an example");
    assert!(
        page.contains(&format!(
            "```c\n#include <stdio.h>\n#include <string.h>\n\n#include \"meridian_kernels.h\"\n\n{example}```"
        )),
        "{example}"
    );
}
