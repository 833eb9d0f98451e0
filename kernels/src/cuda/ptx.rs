//! The kernels as PTX: compiled ahead, or by NVRTC at the first use and kept in a file.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use cudarc::nvrtc::{self, CompileError, CompileOptions};
use sha2::{Digest, Sha256};

use crate::{KernelError, Missing};

/// The kernels' text.
const SOURCE: &str = include_str!("../../cuda/entropy.cu");

/// Compiled by the build, for compute capabilities times ten: the build's nvcc or NVRTC may not know all.
const AHEAD: &[(u32, &str)] = include!(concat!(env!("OUT_DIR"), "/ptx.rs"));

/// Compute capabilities times ten that the kernels are compiled for, newest first; they run on newer ones too.
const TARGETS: [u32; 3] = [100, 90, 80];

/// PTX of the build for a device of this compute capability.
pub(super) fn ahead(capability: u32) -> Option<&'static str> {
    let fits = AHEAD.iter().filter(|(target, _)| *target <= capability);
    fits.max_by_key(|(target, _)| *target).map(|(_, ptx)| *ptx)
}

/// Targets that a device of this compute capability runs, the best first; never none.
pub(super) fn targets(capability: u32) -> Result<Vec<u32>, KernelError> {
    let found: Vec<u32> = TARGETS.into_iter().filter(|target| *target <= capability).collect();
    if found.is_empty() { Err(KernelError::Unavailable(Missing::Architecture(capability))) } else { Ok(found) }
}

/// By NVRTC for a device of this compute capability, or what it made before of the same text: that is kept in
/// `$MERIDIAN_KERNEL_CACHE`, else below the user's cache folder.
pub(super) fn by_nvrtc(capability: u32) -> Result<String, KernelError> {
    let named = std::env::var_os("MERIDIAN_KERNEL_CACHE").map(PathBuf::from);
    let usual = || {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
        Some(cache.join("meridian/kernels"))
    };
    let folder = named.or_else(usual).filter(|folder| folder.is_absolute());
    let mut made = Err(KernelError::Unavailable(Missing::Architecture(capability)));
    for target in targets(capability)? {
        made = kept_or_compiled(folder.as_deref(), SOURCE, target);
        // An NVRTC that does not know the newest targets knows older ones.
        if !matches!(made, Err(KernelError::Compile(_))) {
            break;
        }
    }
    made
}

fn kept_or_compiled(folder: Option<&Path>, source: &str, target: u32) -> Result<String, KernelError> {
    // SAFETY: loading the library runs its initialisers, as every user of NVRTC does.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(KernelError::Unavailable(Missing::Nvrtc));
    }
    for name in [
        "nvrtcVersion",
        "nvrtcCreateProgram",
        "nvrtcCompileProgram",
        "nvrtcDestroyProgram",
        "nvrtcGetPTXSize",
        "nvrtcGetPTX",
        "nvrtcGetProgramLogSize",
        "nvrtcGetProgramLog",
    ] {
        // SAFETY: the library was found above; the function is looked up, and not called as this type.
        if unsafe { nvrtc::sys::culib().get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err() {
            return Err(KernelError::Unavailable(Missing::Symbol(name)));
        }
    }
    let version = version()?;
    let kept = folder.map(|folder| folder.join(file(version, source, target)));
    if let Some(ptx) = kept.as_deref().and_then(read) {
        return Ok(ptx);
    }
    let ptx = compile(source, target)?;
    if let Some(path) = kept
        && let Err(error) = write(&path, &ptx)
    {
        tracing::debug!("the compiled kernels are not kept: {}: {error}", path.display());
    }
    Ok(ptx)
}

/// Compile a text with NVRTC, which must be there.
fn compile(source: &str, target: u32) -> Result<String, KernelError> {
    let options = CompileOptions {
        options: vec![format!("--gpu-architecture=compute_{target}"), "--std=c++17".into()],
        name: Some("entropy.cu".into()),
        ..CompileOptions::default()
    };
    match nvrtc::compile_ptx_with_opts(source, options) {
        Ok(ptx) => Ok(ptx.to_src()),
        Err(CompileError::CompileError { log, .. }) => {
            Err(KernelError::Compile(log.to_string_lossy().trim().chars().take(2000).collect()))
        }
        Err(other) => Err(KernelError::Compile(other.to_string())),
    }
}

/// Version of NVRTC, and that it works: a stub of the library has the functions too, and cudarc takes any answer for one of
/// those it knows.
fn version() -> Result<(i32, i32), KernelError> {
    type Version = unsafe extern "C" fn(*mut i32, *mut i32) -> i32;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the function was found, and is of this type; both are written to.
    let code = unsafe {
        let found = nvrtc::sys::culib().get::<Version>(b"nvrtcVersion");
        found.map(|version| version(&raw mut major, &raw mut minor))
    };
    if matches!(code, Ok(0)) { Ok((major, minor)) } else { Err(KernelError::Unavailable(Missing::Nvrtc)) }
}

/// Name of the file with the PTX of this text by this NVRTC.
fn file((major, minor): (i32, i32), source: &str, target: u32) -> String {
    let key = sha256(&format!("{major}.{minor} compute_{target}\n{source}"));
    format!("{}.ptx", &key[..32])
}

/// A kept text, if it is what was written: the first line is the SHA-256 of the rest.
fn read(path: &Path) -> Option<String> {
    let kept = fs::read_to_string(path).ok()?;
    let (first, ptx) = kept.split_once('\n')?;
    (first == format!("// sha256 {}", sha256(ptx))).then(|| ptx.to_owned())
}

/// In a file of its own first: another process may read at the same time.
fn write(path: &Path, ptx: &str) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(folder)?;
    // A process of the same number may have left one behind, in a container for example.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let made = path.with_extension(format!("{}-{now}.tmp", std::process::id()));
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&made)?;
    let written = write!(file, "// sha256 {}\n{ptx}", sha256(ptx)).and_then(|()| fs::rename(&made, path));
    if written.is_err() {
        let _ = fs::remove_file(&made);
    }
    written
}

fn sha256(text: &str) -> String {
    Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[path = "../../tests/support/emulator.rs"]
mod emulator;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::{AHEAD, SOURCE, TARGETS, ahead, emulator, kept_or_compiled, targets};
    use crate::{KernelError, Missing};

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("meridian-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn nvrtc_compiles_every_target_once() {
        emulator::load_nvrtc();
        let folder = folder("ptx");
        for target in TARGETS {
            let ptx = kept_or_compiled(Some(&folder), SOURCE, target).expect("it compiles");
            assert!(ptx.contains(&format!(".target sm_{target}")));
            assert!(ptx.contains("ld.global.nc.L1::no_allocate.v4.u32") && ptx.contains("meridian_entropy_f16"));
        }
        let files: Vec<PathBuf> =
            fs::read_dir(&folder).expect("made").map(|entry| entry.expect("read").path()).collect();
        assert_eq!(files.len(), 3);
        let first = kept_or_compiled(Some(&folder), SOURCE, 90).expect("kept");
        for path in &files {
            // As if by a fault of the disk, or by somebody else.
            let kept = fs::read_to_string(path).expect("kept");
            fs::write(path, kept.replace("ret;", "trap;")).expect("written");
        }
        assert_eq!(kept_or_compiled(Some(&folder), SOURCE, 90).expect("compiled again"), first);
        fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn what_is_kept_is_read() {
        emulator::load_nvrtc();
        let folder = folder("kept");
        let source = "extern \"C\" __global__ void other(int *p) { *p = 1; }";
        let compiled = kept_or_compiled(Some(&folder), source, 80).expect("it compiles");
        let path = fs::read_dir(&folder).expect("made").next().expect("one").expect("read").path();
        let made = fs::metadata(&path).and_then(|file| file.modified()).expect("a time");
        assert_eq!(kept_or_compiled(Some(&folder), source, 80).expect("kept"), compiled);
        assert_eq!(fs::metadata(&path).and_then(|file| file.modified()).expect("a time"), made);
        assert_eq!(kept_or_compiled(None, source, 80).expect("kept nowhere"), compiled);
        // A folder that cannot be: nothing is lost but time.
        assert_eq!(kept_or_compiled(Some(&path.join("below")), source, 80).expect("not kept"), compiled);
        fs::remove_dir_all(&folder).expect("removed");
    }

    #[test]
    fn a_text_that_does_not_compile() {
        emulator::load_nvrtc();
        let refused = kept_or_compiled(None, "extern int nothing(;", 90).expect_err("refused");
        let KernelError::Compile(said) = &refused else { panic!("{refused}") };
        assert!(said.starts_with("entropy.cu(1): error"), "{said}");
    }

    #[test]
    fn targets_of_devices() {
        let best = [80, 86, 89, 90, 100, 120].map(|capability| targets(capability).expect("new enough")[0]);
        assert_eq!(best, [80, 80, 80, 90, 100, 100]);
        assert_eq!(targets(90), Ok(vec![90, 80]));
        assert_eq!(targets(75), Err(KernelError::Unavailable(Missing::Architecture(75))));
        assert_eq!(ahead(75), None);
    }

    /// With `MERIDIAN_EXPECT_AHEAD`: by this compiler. scripts/check-kernels.sh builds in each way.
    #[test]
    fn the_build_carries_what_it_compiled() {
        let by = env!("MERIDIAN_AHEAD");
        assert_eq!(AHEAD.len(), if by == "none" { 0 } else { TARGETS.len() });
        for (target, ptx) in AHEAD {
            assert!(ptx.contains(&format!(".target sm_{target}")) && ptx.contains("meridian_entropy_bf16"));
            assert_eq!(ahead(*target), Some(*ptx));
        }
        if let Ok(expected) = std::env::var("MERIDIAN_EXPECT_AHEAD") {
            assert_eq!(by, expected);
        }
    }
}
