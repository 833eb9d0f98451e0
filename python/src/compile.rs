//! Where the components of a Python process are compiled: in another Python, which can be killed.
//!
//! It loads this very module, so that both have the same wasmtime, and no program has to be found.

use std::path::PathBuf;

use meridian_engine::{CompileCommand, set_compile_command};
use pyo3::prelude::*;

/// From now on, compile components in processes of this interpreter. An interpreter that cannot be started again (a frozen
/// program, one inside another program) compiles on threads.
pub(crate) fn start_processes(py: Python<'_>) {
    if let Ok(Some(command)) = command(py) {
        set_compile_command(command);
    }
}

/// The interpreter with a file of this package, and this module's file. Neither the variables of the environment nor
/// site-packages are looked at, so that nothing but the standard library and this module is imported.
fn command(py: Python<'_>) -> PyResult<Option<CompileCommand>> {
    let sys = py.import("sys")?;
    let is_frozen = sys.getattr_opt("frozen")?.map_or(Ok(false), |frozen| frozen.is_truthy())?;
    let interpreter: Option<PathBuf> = sys.getattr("executable")?.extract()?;
    let module: PathBuf = py.import("meridian._native")?.getattr("__file__")?.extract()?;
    let script = module.with_file_name("_compile.py");
    let Some(interpreter) = interpreter.filter(|path| path.is_absolute() && !is_frozen && script.is_file()) else {
        return Ok(None);
    };
    let args = ["-I".into(), "-S".into(), script.into_os_string(), module.into_os_string()];
    Ok(Some(CompileCommand::new(interpreter, args)))
}

/// The life of such a process; returns the exit code.
#[pyfunction]
pub(crate) fn compile_child() -> u8 {
    meridian_engine::compile_child()
}
