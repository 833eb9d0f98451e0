//! Starting a process that compiles one component, hearing it out, and ending it.

use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memfd::MemfdOptions;

use super::wire::{self, Answer, Compiled, MAX_LINE_BYTES, Request};
use super::{CompileCommand, CompileLimits, MAX_RUNNING, lock, os};
use crate::LoadError;
use crate::artifact::Artifact;
use crate::error::one_line;

/// What the dynamic loader may need to start the program. Nothing else of the environment is handed on.
const KEPT_VARIABLE: &str = "LD_LIBRARY_PATH";
/// What is kept of the end of standard error, which holds the reason of a crash.
const STDERR_BYTES: usize = 4 << 10;
const PIPE_BYTES: usize = 64 << 10;

/// Processes that compile, [`MAX_RUNNING`] at a time.
pub(crate) struct Children {
    command: CompileCommand,
    running: Mutex<usize>,
    ended: Condvar,
}

impl Children {
    pub(crate) fn new(command: CompileCommand) -> Self {
        Self { command, running: Mutex::default(), ended: Condvar::new() }
    }

    /// Check and compile a component in a process of its own, which has ended when this returns.
    pub(crate) fn compile(&self, component: &[u8]) -> Result<Artifact, LoadError> {
        let limits = self.command.limits();
        let _turn = self.turn(limits.time)?;
        let until = Instant::now() + limits.time;
        let mut process = Process::start(&self.command, component).map_err(|error| LoadError::Setup {
            detail: format!("cannot start {} to compile: {error}", self.command.program().display()),
        })?;
        let heard = process.listen(until, limits)?;
        let status = process.end();
        judge(heard, status, limits)
    }

    /// Wait for a turn. Every process ends within its limit of time, so one comes.
    fn turn(&self, patience: Duration) -> Result<Turn<'_>, LoadError> {
        let taken = self.ended.wait_timeout_while(lock(&self.running), patience, |running| *running >= MAX_RUNNING);
        let (mut running, waited) = taken.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            return Err(LoadError::CompilerBusy { running: *running });
        }
        *running += 1;
        Ok(Turn(self))
    }
}

struct Turn<'a>(&'a Children);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *lock(&self.0.running) -= 1;
        self.0.ended.notify_one();
    }
}

/// A process that is killed and reaped at the latest when this is dropped.
struct Process {
    child: Child,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
}

/// What a process wrote.
#[derive(Default)]
struct Heard {
    stdout: Vec<u8>,
    /// The end of it.
    stderr: Vec<u8>,
}

impl Process {
    fn start(command: &CompileCommand, component: &[u8]) -> io::Result<Self> {
        let limits = command.limits();
        // A file in memory: nothing is written to a pipe that may be closed, or read too slowly.
        let mut input = MemfdOptions::new().create("meridian-component").map_err(io::Error::other)?.into_file();
        // The deadline comes first; this is for a process whose parent hangs.
        let cpu_s = limits.time.as_secs() + 1;
        let request = Request { parent: std::process::id(), cpu_s, memory_bytes: limits.memory_bytes };
        input.write_all(&wire::line(&request))?;
        input.write_all(component)?;
        input.rewind()?;
        let mut starting = Command::new(command.program());
        starting.args(command.args()).current_dir("/").env_clear();
        starting.envs(std::env::var_os(KEPT_VARIABLE).map(|value| (KEPT_VARIABLE, value)));
        starting.stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = starting.spawn()?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        Ok(Self { child, stdout, stderr })
    }

    /// Read both pipes as they fill until the process has closed them.
    fn listen(&mut self, until: Instant, limits: CompileLimits) -> Result<Heard, LoadError> {
        let most = limits.artifact_bytes.saturating_add(MAX_LINE_BYTES as u64);
        let unreadable = |error: io::Error| failed(format!("its output cannot be read: {error}"));
        let mut heard = Heard::default();
        let mut buffer = vec![0; PIPE_BYTES];
        while self.stdout.is_some() || self.stderr.is_some() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LoadError::CompileDeadline { limit: limits.time });
            }
            let pipes = [self.stdout.as_ref().map(AsFd::as_fd), self.stderr.as_ref().map(AsFd::as_fd)];
            let [stdout, stderr] = os::readable(pipes, left).map_err(unreadable)?;
            if stdout {
                heard.stdout.extend(read_some(&mut self.stdout, &mut buffer).map_err(unreadable)?);
                if heard.stdout.len() as u64 > most {
                    return Err(failed(format!("it wrote more than {most} bytes")));
                }
            }
            if stderr {
                heard.stderr.extend(read_some(&mut self.stderr, &mut buffer).map_err(unreadable)?);
                let excess = heard.stderr.len().saturating_sub(STDERR_BYTES);
                heard.stderr.drain(..excess);
            }
        }
        Ok(heard)
    }

    /// How the process ended; `None` where the program that this one is part of has children reaped by itself. To kill
    /// one that has closed its pipes by ending changes nothing; another has no more to say.
    fn end(&mut self) -> Option<ExitStatus> {
        let _ = self.child.kill();
        self.child.wait().ok()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// What a pipe holds, without waiting for more; at its end the pipe is closed.
fn read_some<'a, R: Read>(pipe: &mut Option<R>, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
    let Some(open) = pipe else { return Ok(&[]) };
    let count = match open.read(buffer) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(&[]),
        read => read?,
    };
    if count == 0 {
        *pipe = None;
    }
    Ok(&buffer[..count])
}

/// The compiled form, if it is whole. How the process ended is the reason where it is not.
fn judge(heard: Heard, status: Option<ExitStatus>, limits: CompileLimits) -> Result<Artifact, LoadError> {
    let Heard { mut stdout, stderr } = heard;
    let or = |problem: &str| crash(status, &stderr, limits).unwrap_or_else(|| failed(problem.to_owned()));
    let Some((answer, length)) = wire::parse::<Answer>(&stdout) else { return Err(or("it gave no answer")) };
    let Compiled { bytes, sha256 } = answer.compiled(limits.memory_bytes)?;
    stdout.drain(..length);
    if stdout.len() as u64 != bytes {
        return Err(or(&format!("it announced {bytes} bytes and wrote {}", stdout.len())));
    }
    Artifact::verified(stdout, &sha256).ok_or_else(|| or("the digest of its result does not match"))
}

fn failed(problem: String) -> LoadError {
    LoadError::CompileFailed { problem }
}

/// Why the process did not end well; `None` when it did.
fn crash(status: Option<ExitStatus>, stderr: &[u8], limits: CompileLimits) -> Option<LoadError> {
    let status = status.filter(|status| !status.success())?;
    let stderr = String::from_utf8_lossy(stderr);
    // The last words of a Rust program whose allocation fails.
    if stderr.lines().any(|line| line.starts_with("memory allocation of ") && line.ends_with(" failed")) {
        return Some(LoadError::CompileMemory { limit_bytes: limits.memory_bytes });
    }
    let last = stderr.lines().rev().find(|line| !line.trim().is_empty()).map(|line| one_line(&line));
    let because = last.map(|line| format!(": {line}")).unwrap_or_default();
    Some(match (status.signal(), status.code()) {
        (Some(libc::SIGXCPU), _) => LoadError::CompileDeadline { limit: limits.time },
        // By an operator, or by Linux when the memory of the machine or container is used up.
        (Some(libc::SIGKILL), _) => failed(format!("it was killed{because}")),
        (Some(signal), _) => failed(format!("it ended with signal {signal}{because}")),
        (None, code) => failed(format!("it ended with code {}{because}", code.unwrap_or_default())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_limited_and_come_back() {
        let children = Children::new(CompileCommand::new("/nowhere", [""; 0]));
        let turns = [(); MAX_RUNNING].map(|()| children.turn(Duration::ZERO).unwrap());
        let busy = children.turn(Duration::ZERO).err().unwrap();
        assert_eq!(busy.to_string(), "2 components are still being compiled; try again when they are done");
        // Some process ends while another component waits.
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| children.turn(Duration::from_secs(600)).map(drop));
            drop(turns);
            waiting.join().unwrap().unwrap();
        });
        // One that cannot be started gives its turn back.
        for _ in 0..=MAX_RUNNING {
            let missing = children.compile(b"").err().unwrap();
            assert!(matches!(missing, LoadError::Setup { .. }), "{missing}");
        }
    }
}
