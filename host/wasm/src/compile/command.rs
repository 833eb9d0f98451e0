use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::COMPILE_DEADLINE;

/// Most memory of a compilation beside that of the program itself, bytes. The worst components within the limits of
/// [`complexity`](crate::complexity) take 0.6 GB, two of them in one component about one.
const COMPILE_MEMORY_BYTES: u64 = 2 << 30;

/// Largest compiled form, bytes.
const ARTIFACT_BYTES: u64 = 512 << 20;

/// How to start the process that compiles one component and ends: a program that calls
/// [`compile_child`](crate::compile_child).
///
/// The process gets neither the environment (only `LD_LIBRARY_PATH`) nor the working folder of the one that starts it.
///
/// ```no_run
/// use meridian_wasm::{CompileCommand, Runtime, compile_child};
///
/// // The program starts itself, even when its file was replaced meanwhile.
/// if std::env::args().nth(1).as_deref() == Some("compile") {
///     std::process::exit(compile_child().into());
/// }
/// let runtime = Runtime::new(None)?.with_compiler(CompileCommand::new("/proc/self/exe", ["compile"]));
/// # Ok::<(), meridian_wasm::LoadError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileCommand {
    program: PathBuf,
    args: Vec<OsString>,
    limits: CompileLimits,
}

impl CompileCommand {
    /// `program` is an absolute path.
    pub fn new<A: Into<OsString>>(program: impl Into<PathBuf>, args: impl IntoIterator<Item = A>) -> Self {
        let args = args.into_iter().map(Into::into).collect();
        Self { program: program.into(), args, limits: CompileLimits::default() }
    }

    /// Set the limits of compiling.
    #[must_use]
    pub fn with_limits(self, limits: CompileLimits) -> Self {
        Self { limits, ..self }
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    pub(crate) fn args(&self) -> &[OsString] {
        &self.args
    }

    pub(crate) fn limits(&self) -> CompileLimits {
        self.limits
    }
}

/// Limits of one compilation in its own process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileLimits {
    /// From the start of the process to its end; also the longest wait until one may start.
    pub time: Duration,
    /// Address space beside that of the program itself, bytes.
    pub memory_bytes: u64,
    /// Compiled form, bytes.
    pub artifact_bytes: u64,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self { time: COMPILE_DEADLINE, memory_bytes: COMPILE_MEMORY_BYTES, artifact_bytes: ARTIFACT_BYTES }
    }
}
