//! The process that compiles one component.

use std::io::{self, Read, Write};
use std::os::unix::process::parent_id;
use std::thread;

use sha2::{Digest, Sha256};
use wasmtime::{Engine, OutOfMemory};

use super::wire::{self, Answer, Compiled, MAX_LINE_BYTES, Request};
use super::{STACK_BYTES, os};
use crate::cache::hex;
use crate::error::one_line;
use crate::{LoadError, MAX_COMPONENT_BYTES, complexity, runtime};

/// The whole life of the process that a [`CompileCommand`](crate::CompileCommand) starts: take a component from standard
/// input, lower the limits of this process, check the component, compile it, and answer on standard output. Returns the
/// exit code.
///
/// Changes limits of the process for good, so a program that calls it does nothing else.
#[must_use]
pub fn compile_child() -> u8 {
    match serve(io::stdin().lock(), io::stdout().lock()) {
        Ok(()) => 0,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: {error}");
            2
        }
    }
}

fn serve(input: impl Read, mut output: impl Write) -> io::Result<()> {
    os::die_with_parent()?;
    let mut given = Vec::new();
    input.take(MAX_COMPONENT_BYTES + MAX_LINE_BYTES as u64).read_to_end(&mut given)?;
    let Some((request, length)) = wire::parse::<Request>(&given) else {
        return Err(io::Error::other("standard input: expected a request of the process that compiles a component"));
    };
    // One that ended before the first line of this function sends no signal.
    if request.parent != parent_id() {
        return Err(io::Error::other("the process that wants the component has ended"));
    }
    os::lower_limits(&request)?;
    match compile_on_thread(&given[length..]) {
        Ok(artifact) => {
            let sha256 = hex(&Sha256::digest(&artifact));
            let compiled = Compiled { bytes: artifact.len() as u64, sha256 };
            output.write_all(&wire::line(&Answer::Compiled(compiled)))?;
            output.write_all(&artifact)?;
        }
        Err(answer) => output.write_all(&wire::line(&answer))?,
    }
    output.flush()
}

/// On a stack of known size.
fn compile_on_thread(component: &[u8]) -> Result<Vec<u8>, Answer> {
    let no_thread = |error| Answer::Setup { detail: format!("cannot start the compile thread: {error}") };
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("meridian-compile".into()).stack_size(STACK_BYTES);
        let thread = builder.spawn_scoped(scope, || compile(component)).map_err(no_thread)?;
        thread.join().unwrap_or_else(|_| Err(Answer::Invalid { detail: "the compiler panicked over it".into() }))
    })
}

fn compile(component: &[u8]) -> Result<Vec<u8>, Answer> {
    complexity::check(component)?;
    let refused = |error: wasmtime::Error, other: fn(String) -> LoadError| {
        if error.is::<OutOfMemory>() { Answer::OutOfMemory } else { other(one_line(&error)).into() }
    };
    let engine = Engine::new(&runtime::code_config()?);
    let engine = engine.map_err(|error| refused(error, |detail| LoadError::Setup { detail }))?;
    engine.precompile_component(component).map_err(|error| refused(error, |detail| LoadError::Invalid { detail }))
}
