//! `meridian._native`: the host engine for Python.
//!
//! Small on purpose; the documented API is the typed Python package around it. Requests are known here by handles, any
//! Python objects, compared by identity: for vLLM its own `Request` objects, so that a step reads no attribute of them.

mod budget;
mod compile;
mod engine;
mod facts;
mod handles;
mod kernels;
mod kv;
mod log;
mod markers;
mod policies;
mod rows;
mod thinking;

use std::ffi::OsString;
use std::path::PathBuf;

use meridian_core::text::printable;
use meridian_core::{MeridianConfig, ModelFamily};
use meridian_engine::config_file;
use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

create_exception!(_native, ConfigError, PyValueError, "A configuration that is not valid; names the field.");
create_exception!(_native, PolicyError, PyValueError, "A policy that was refused; says why.");

/// Parse and validate the text of a `meridian.toml`; returns the effective configuration as JSON.
#[pyfunction]
fn parse_config(text: &str) -> PyResult<String> {
    to_json(&MeridianConfig::from_toml(text).map_err(config_error)?)
}

/// Find, read and parse a `meridian.toml`: `path`, or the one that the surroundings name. Returns the effective
/// configuration as JSON, what relative paths are relative to, the file, and what `meridian config check` would warn of.
#[pyfunction]
fn load_config(path: Option<PathBuf>) -> PyResult<(String, String, Option<String>, Vec<String>)> {
    let found = config_file::load(path.as_deref()).map_err(config_error)?;
    let warnings = found.parsed.warnings().iter().map(|line| printable(line).into_owned()).collect();
    // An engine follows the file, whatever the working folder is by then.
    let file = found.path.map(|path| std::path::absolute(&path).unwrap_or(path).display().to_string());
    Ok((to_json(&found.parsed.config)?, found.base_dir.display().to_string(), file, warnings))
}

/// A known model family as JSON; the fields are those of `models/NAME.toml`.
#[pyfunction]
fn model_family(name: &str) -> PyResult<String> {
    to_json(ModelFamily::find(name).map_err(config_error)?)
}

/// Every known model family, as a list in JSON.
#[pyfunction]
fn model_families() -> PyResult<String> {
    to_json(&ModelFamily::all())
}

/// The tokens in a file of `admin.token_file`, and whether their role allows changes, with the checks that the admin listener
/// makes.
#[pyfunction]
fn read_admin_tokens(path: PathBuf) -> PyResult<Vec<(String, bool)>> {
    let named = |why: String| config_error(format!("admin.token_file: {}: {why}", path.display()));
    meridian_admin::read_all_tokens(&path).map_err(named)
}

/// Run the `meridian` command with these arguments, the program's name first; returns its exit code.
#[pyfunction]
fn run_command(py: Python<'_>, args: Vec<OsString>) -> u8 {
    compile::start_processes(py);
    py.detach(|| meridian_cli::run(args))
}

pub(crate) fn to_json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(config_error)
}

/// Tracebacks and logs show it: paths and values in it are others' to choose.
pub(crate) fn config_error(error: impl std::fmt::Display) -> PyErr {
    ConfigError::new_err(printable(&error.to_string()).into_owned())
}

/// The same for a policy.
pub(crate) fn policy_error(error: impl std::fmt::Display) -> PyErr {
    PolicyError::new_err(printable(&error.to_string()).into_owned())
}

/// What the host has logged since the last call: (Python's number of the level, line), oldest first.
#[pyfunction]
fn take_log() -> Vec<(u8, String)> {
    log::take()
}

/// Wait until the host has logged something that nobody took, so many seconds at most; whether it has.
#[pyfunction]
fn wait_for_log(py: Python<'_>, patience_s: f64) -> bool {
    py.detach(|| log::wait(std::time::Duration::try_from_secs_f64(patience_s).unwrap_or_default()))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("ConfigError", module.py().get_type::<ConfigError>())?;
    module.add("PolicyError", module.py().get_type::<PolicyError>())?;
    module.add("PanicException", module.py().get_type::<pyo3::panic::PanicException>())?;
    module.add_function(wrap_pyfunction!(parse_config, module)?)?;
    module.add_function(wrap_pyfunction!(load_config, module)?)?;
    module.add_function(wrap_pyfunction!(model_family, module)?)?;
    module.add_function(wrap_pyfunction!(model_families, module)?)?;
    module.add_function(wrap_pyfunction!(read_admin_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(tool_call_texts, module)?)?;
    module.add_function(wrap_pyfunction!(compile::compile_child, module)?)?;
    module.add_function(wrap_pyfunction!(run_command, module)?)?;
    module.add_function(wrap_pyfunction!(take_log, module)?)?;
    module.add_function(wrap_pyfunction!(wait_for_log, module)?)?;
    module.add_function(wrap_pyfunction!(budget::eat, module)?)?;
    module.add_function(wrap_pyfunction!(budget::rpdi, module)?)?;
    module.add_function(wrap_pyfunction!(kernels::launch_rows, module)?)?;
    module.add("KernelError", module.py().get_type::<kernels::KernelError>())?;
    module.add("KernelUnavailable", module.py().get_type::<kernels::KernelUnavailable>())?;
    module.add_class::<kernels::PendingRows>()?;
    module.add_class::<policies::Policies>()?;
    module.add_class::<kv::BlockPool>()?;
    module.add_class::<rows::BudgetRows>()?;
    module.add_class::<rows::StepReport>()?;
    module.add_class::<handles::StepPlan>()?;
    module.add_class::<thinking::Thinking>()?;
    module.add_class::<engine::Engine>()
}

/// What begins a tool call in any known family of models.
#[pyfunction]
fn tool_call_texts() -> Vec<String> {
    let mut texts: Vec<String> =
        ModelFamily::all().iter().flat_map(|family| family.tool_call.iter().cloned()).collect();
    texts.sort();
    texts.dedup();
    texts
}
