//! The kernels compiled ahead, by nvcc or by NVRTC. Where neither is there, NVRTC does it at the first use.
#![expect(unsafe_code, reason = "a library is looked for")]

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use cudarc::nvrtc::{self, CompileError, CompileOptions};

const SOURCE: &str = "cuda/entropy.cu";
/// Compute capabilities times ten.
const TARGETS: [u32; 3] = [80, 90, 100];

/// Writes `&[(target, PTX), ...]` to OUT_DIR/ptx.rs.
pub(super) fn build() {
    for name in ["MERIDIAN_NVCC", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed={SOURCE}");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut list = String::from("&[");
    let compiler = Compiler::find();
    println!("cargo::rustc-env=MERIDIAN_AHEAD={}", compiler.as_ref().map_or("none", Compiler::name));
    if let Some(compiler) = compiler {
        for target in TARGETS {
            let path = out.join(format!("entropy_{target}.ptx"));
            match compiler.compile(target) {
                Ok(ptx) => {
                    fs::write(&path, ptx).expect("OUT_DIR can be written to");
                    write!(list, "({target}, include_str!({path:?})), ").expect("a string takes all");
                }
                // One that does not know a target: what is older runs there too.
                Err(why) => println!("cargo::warning=kernels for sm_{target} are not compiled ahead: {why}"),
            }
        }
    }
    list.push(']');
    fs::write(out.join("ptx.rs"), list).expect("OUT_DIR can be written to");
}

enum Compiler {
    Nvcc(PathBuf),
    Nvrtc,
}

impl Compiler {
    /// MERIDIAN_NVCC, or none at all when that is ""; else that of CUDA_HOME or CUDA_PATH, or of the search path; else
    /// NVRTC, where the loader finds it.
    fn find() -> Option<Self> {
        if let Some(named) = env::var_os("MERIDIAN_NVCC") {
            return (!named.is_empty()).then(|| Self::Nvcc(PathBuf::from(named)));
        }
        let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os);
        let homes = homes.map(|home| PathBuf::from(home).join("bin"));
        let path = env::var_os("PATH").unwrap_or_default();
        let mut all = homes.chain(env::split_paths(&path)).map(|folder| folder.join("nvcc"));
        // SAFETY: loading the library runs its initialisers, as every user of NVRTC does.
        let nvrtc = || unsafe { nvrtc::sys::is_culib_present() }.then_some(Self::Nvrtc);
        all.find(|path| path.is_file()).map(Self::Nvcc).or_else(nvrtc)
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Nvcc(_) => "nvcc",
            Self::Nvrtc => "nvrtc",
        }
    }

    fn compile(&self, target: u32) -> Result<String, String> {
        match self {
            Self::Nvcc(nvcc) => by_nvcc(nvcc, target),
            Self::Nvrtc => by_nvrtc(target),
        }
    }
}

fn by_nvcc(nvcc: &Path, target: u32) -> Result<String, String> {
    let mut command = Command::new(nvcc);
    command.args(["-ptx", "-std=c++17", "-o", "-", SOURCE]).arg(format!("-arch=compute_{target}"));
    // Its parts are beside it.
    if let Some(folder) = nvcc.parent() {
        let path = env::var_os("PATH").unwrap_or_default();
        let all = std::iter::once(folder.to_owned()).chain(env::split_paths(&path));
        command.env("PATH", env::join_paths(all).map_err(|error| error.to_string())?);
    }
    let output = command.output().map_err(|error| format!("{}: {error}", nvcc.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(said.lines().next().unwrap_or("nvcc failed").to_owned());
    }
    String::from_utf8(output.stdout).map_err(|error| error.to_string())
}

fn by_nvrtc(target: u32) -> Result<String, String> {
    let source = fs::read_to_string(SOURCE).map_err(|error| error.to_string())?;
    let options = vec![format!("--gpu-architecture=compute_{target}"), "--std=c++17".into()];
    let options = CompileOptions { options, name: Some("entropy.cu".into()), ..CompileOptions::default() };
    match nvrtc::compile_ptx_with_opts(source, options) {
        Ok(ptx) => Ok(ptx.to_src()),
        Err(CompileError::CompileError { log, .. }) => {
            Err(log.to_string_lossy().lines().next().unwrap_or("NVRTC failed").to_owned())
        }
        Err(other) => Err(other.to_string()),
    }
}
