use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use super::{Job, RecordedRun};

/// Longest that one run may take beyond the time in which its requests arrive.
const RUN_LIMIT: Duration = Duration::from_secs(900);
/// How often a run is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Lines of a log that are shown when a run has failed.
const LOG_TAIL_LINES: usize = 12;
/// Of a log, the bytes that are looked at: what an engine says before it dies is at its end.
const LOG_TAIL_BYTES: usize = 64 << 10;

/// Why a run gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Python cannot be started.
    #[error("{python}: cannot be started: {why}, expected a Python with Meridian and vLLM (MERIDIAN_PYTHON names it)")]
    Python {
        /// The command.
        python: String,
        /// What the system says.
        why: io::Error,
    },
    /// A file cannot be written or read.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// What the system says.
        why: io::Error,
    },
    /// There is no model to run.
    #[error("{0}")]
    Model(String),
    /// Meridian refuses a setting.
    #[error("{0:#}")]
    Setting(anyhow::Error),
    /// The run ended with an error.
    #[error("{what}: {why}")]
    Failed {
        /// Which run.
        what: String,
        /// Its own word, or the end of its log.
        why: String,
    },
    /// It wrote something else than expected.
    #[error("{0:#}")]
    Recorded(anyhow::Error),
}

impl RunError {
    /// Whether something else has to be given, and no engine was to blame.
    #[must_use]
    pub fn is_input(&self) -> bool {
        matches!(self, Self::Model(_) | Self::Setting(_))
    }
}

/// The Python that has Meridian and vLLM.
#[derive(Clone, Debug)]
pub struct Python {
    command: PathBuf,
}

/// The Python that `MERIDIAN_PYTHON` names, else the one beside this program, where the wheel puts it, else `python3`.
pub fn python_command() -> PathBuf {
    let beside = || Some(std::env::current_exe().ok()?.with_file_name("python3")).filter(|python| python.is_file());
    let named = std::env::var_os("MERIDIAN_PYTHON").map(PathBuf::from);
    named.or_else(beside).unwrap_or_else(|| "python3".into())
}

impl Default for Python {
    /// [`python_command`].
    fn default() -> Self {
        Self { command: python_command() }
    }
}

impl Python {
    /// This module, with the environment of this process.
    fn module(&self, name: &str) -> Command {
        let mut command = Command::new(&self.command);
        command.args(["-m", name]);
        command
    }

    fn cannot_start(&self, why: io::Error) -> RunError {
        RunError::Python { python: self.command.display().to_string(), why }
    }

    /// The folder of a small model with random weights, made where it is missing.
    ///
    /// # Errors
    /// [`RunError`]: no model, vLLM is not installed.
    pub fn small_model(&self) -> Result<String, RunError> {
        self.model(&[])
    }

    /// The folder of the bundled reasoner.
    ///
    /// # Errors
    /// [`RunError`]: this is not the repository.
    pub fn reasoner(&self) -> Result<String, RunError> {
        self.model(&["--reasoner"])
    }

    fn model(&self, args: &[&str]) -> Result<String, RunError> {
        let made = self.module("meridian.vllm.bench.model").args(args).stderr(Stdio::piped()).output();
        let made = made.map_err(|why| self.cannot_start(why))?;
        if !made.status.success() {
            let log = String::from_utf8_lossy(&made.stderr);
            return Err(RunError::Model(own_word(&log, made.status, None)));
        }
        Ok(String::from_utf8_lossy(&made.stdout).trim().to_owned())
    }

    /// One run in a process of its own. What it was told, what it recorded and its log stay beside `stem`, as `.job.json`,
    /// `.json` and `.log`.
    ///
    /// # Errors
    /// [`RunError`], with the end of its log.
    pub fn run(&self, what: &str, stem: &Path, job: &Job) -> Result<RecordedRun, RunError> {
        let beside = |suffix: &str| PathBuf::from(format!("{}{suffix}", stem.display()));
        let (told, recorded) = (beside(".job.json"), beside(".json"));
        let text = serde_json::to_vec(job).map_err(|error| RunError::Recorded(error.into()))?;
        fs::write(&told, text).map_err(of_file(&told))?;
        let limit = RUN_LIMIT + arriving(job);
        self.run_module("meridian.vllm.bench", [&told, &recorded], what, &beside(".log"), limit)?;
        RecordedRun::read(&recorded).map_err(RunError::Recorded)
    }

    /// A module in a process of its own, with its output in `log`; ended when it takes longer than `limit`.
    pub(crate) fn run_module(
        &self,
        module: &str,
        args: impl IntoIterator<Item: AsRef<OsStr>>,
        what: &str,
        log: &Path,
        limit: Duration,
    ) -> Result<(), RunError> {
        let out = File::create(log).map_err(of_file(log))?;
        let also = out.try_clone().map_err(of_file(log))?;
        let mut command = self.module(module);
        command.args(args).stdin(Stdio::null()).stdout(out).stderr(also);
        let mut child = command.spawn().map_err(|why| self.cannot_start(why))?;
        let failed = |why: String| RunError::Failed { what: what.to_owned(), why };
        let Some(status) = wait(&mut child, limit).map_err(of_file(log))? else {
            return Err(failed(format!("did not end within {} s, see {}", limit.as_secs(), log.display())));
        };
        if status.success() {
            return Ok(());
        }
        let said = fs::read(log).map_err(of_file(log))?;
        let said = String::from_utf8_lossy(&said[said.len().saturating_sub(LOG_TAIL_BYTES)..]).into_owned();
        Err(failed(own_word(&said, status, Some(log))))
    }
}

fn of_file(path: &Path) -> impl Fn(io::Error) -> RunError {
    let path = path.display().to_string();
    move |why| RunError::File { path: path.clone(), why }
}

/// The time in which the requests of a job come.
fn arriving(job: &Job) -> Duration {
    let last_s = job.requests.iter().map(|request| request.arrival_s).fold(0.0, f64::max);
    let turns = job.requests.iter().filter_map(|request| request.turn).max().unwrap_or(0);
    let all_s = if job.realtime { last_s } else { 0.0 } + f64::from(turns) * job.gap_s;
    Duration::try_from_secs_f64(all_s).unwrap_or(Duration::MAX / 2)
}

/// `None` when it took longer than `limit` and was ended.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if started.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The error that a process named itself, or the end of what it said.
fn own_word(log: &str, status: ExitStatus, path: Option<&Path>) -> String {
    let lines: Vec<&str> = log.lines().collect();
    if let Some(at) = lines.iter().rposition(|line| line.starts_with("error: ")) {
        let said = lines[at..].iter().take(LOG_TAIL_LINES + 1).copied().collect::<Vec<_>>().join("\n");
        return said["error: ".len()..].to_owned();
    }
    let tail: Vec<String> =
        lines[lines.len().saturating_sub(LOG_TAIL_LINES)..].iter().map(|line| format!("\n  | {line}")).collect();
    let whose = path.map_or_else(String::new, |path| format!(" of {}", path.display()));
    format!("ended with {status}; the end{whose}:{}", tail.concat())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn the_error_that_a_run_names_is_the_one_that_is_told() {
        let ended = ExitStatus::from_raw(2 << 8);
        assert_eq!(own_word("a\nerror: no model:\n  | why\n", ended, None), "no model:\n  | why");
        let log = (0..40).map(|i| format!("line {i}\n")).collect::<String>();
        let said = own_word(&log, ended, Some(Path::new("x.log")));
        assert!(said.starts_with("ended with exit status: 2; the end of x.log:\n  | line 28"), "{said}");
        assert!(said.ends_with("line 39"));
    }

    #[test]
    fn a_python_that_is_not_there_is_one_line() {
        let python = Python { command: "/nowhere/python".into() };
        let error = python.small_model().unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/python: cannot be started") && !error.contains('\n'), "{error}");
    }
}
