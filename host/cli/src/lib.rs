//! The `meridian` command, as a library so that tests can call it too.

mod bench;
mod config;
mod ctl;
mod experiment;
mod handoff;
mod levels;
mod models;
mod policy;
mod progress;
#[cfg(test)]
mod reference;
mod replay;
mod rollout;
mod target;
mod top;
mod trace;
mod why;

use std::ffi::OsString;
use std::io::Write;

use clap::{Parser, Subcommand};
use meridian_core::text::{is_printable, printable, printable_lines};
use serde::Serialize;

/// Name of the command with which the `meridian` binary starts itself to compile one component.
pub const COMPILE_COMPONENT: &str = "compile-component";

#[derive(Parser)]
#[command(
    name = "meridian",
    version,
    about = "Build, control and measure scheduling policies for reasoning models on vLLM",
    after_help = "Example:\n  meridian policy check target/policies/output-first.wasm"
)]
struct Cli {
    /// Print one JSON object on stdout instead of text
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build and check policy components
    #[command(subcommand, after_help = "Example:\n  meridian policy build policies")]
    Policy(policy::PolicyCommand),
    /// Check and show the configuration, meridian.toml
    #[command(subcommand, after_help = "Example:\n  meridian config check meridian.toml")]
    Config(config::ConfigCommand),
    /// List model families, and check how a tokenizer encodes their thinking markers
    #[command(subcommand, after_help = "Example:\n  meridian models list")]
    Models(models::ModelsCommand),
    /// Compare two policies on a running engine
    #[command(subcommand, after_help = "Example:\n  meridian experiment start mine.wasm")]
    Experiment(Box<experiment::ExperimentCommand>),
    /// Bring a policy to a fleet of engines in steps
    #[command(subcommand, after_help = "Example:\n  meridian rollout start mine.wasm --guard 'output_itl_p99<=1.05x'")]
    Rollout(Box<rollout::RolloutCommand>),
    /// Serve one address before several engines: the first one thinks, another one answers
    Handoff(handoff::HandoffArgs),
    /// Query a running engine and change its policies
    Ctl(ctl::CtlArgs),
    /// Watch a running engine: phases, queues, decisions, faults, versions
    Top(top::TopArgs),
    /// Write a timeline of steps, requests and decisions for Perfetto
    Trace(trace::TraceArgs),
    /// Explain where the time of a request went
    Why(why::WhyArgs),
    /// Repeat recorded decisions and report the differences
    Replay(replay::ReplayArgs),
    /// Measure policies in vLLM, in simulated engines and in microbenchmarks
    #[command(subcommand, after_help = "Example:\n  meridian bench micro")]
    Bench(Box<bench::BenchCommand>),
    /// Compile the component that another process hands over on standard input
    #[command(name = COMPILE_COMPONENT, hide = true)]
    CompileComponent,
}

/// Run the command line and return the exit code: 0 if the request holds, 1 if it does not, 2 for a usage error or for
/// unusable input.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    if let Some(options) = bench::early_exit::options(&args) {
        return match bench::early_exit::EarlyExitArgs::try_parse_from(options) {
            Ok(options) => exit_code(bench::early_exit::run(&options), options.json),
            Err(error) => print_in_a_line(&error),
        };
    }
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => {
            print_usage(&error, &args);
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let done = match cli.command {
        Command::Policy(command) => policy::run(command, cli.json),
        Command::Config(command) => config::run(command, cli.json),
        Command::Models(command) => models::run(command, cli.json),
        Command::Experiment(command) => experiment::run(&command, cli.json),
        Command::Rollout(command) => rollout::run(&command, cli.json),
        Command::Handoff(args) => handoff::run(&args, cli.json),
        Command::Ctl(args) => ctl::run(&args, cli.json),
        Command::Top(args) => top::run(&args, cli.json),
        Command::Trace(args) => trace::run(&args, cli.json),
        Command::Why(args) => why::run(&args, cli.json),
        Command::Replay(args) => replay::run(&args, cli.json),
        Command::Bench(command) => bench::run(*command, cli.json),
        Command::CompileComponent => return meridian_engine::compile_child(),
    };
    exit_code(done, cli.json)
}

/// Report the error, if any, and return the exit code.
fn exit_code(done: anyhow::Result<()>, json: bool) -> u8 {
    let Err(error) = done else { return 0 };
    // Its reader wants no more, as `meridian ... | head` does: that is no failure.
    if error.downcast_ref::<NotPrinted>().is_some_and(NotPrinted::is_closed) {
        return 0;
    }
    let is_unusable = error.is::<Unusable>();
    // The context is for here; the text is the cause's.
    let error = if is_unusable { anyhow::anyhow!(cause_of(&error)) } else { error };
    if error.is::<Said>() {
        // Nothing to add.
    } else if json {
        let _ = print_json(&serde_json::json!({ "ok": false, "error": format!("{error:#}") }));
    } else {
        // Later lines are set back, so that none of them passes for one of the command's own.
        let text = format!("error: {error:#}");
        let lines = text.trim_end().lines().enumerate();
        let set_back =
            lines.map(|(i, line)| if i == 0 || line.starts_with("  ") { line.to_owned() } else { format!("  {line}") });
        let _ = writeln!(std::io::stderr(), "{}", printable_lines(&set_back.collect::<Vec<_>>().join("\n")));
    }
    if is_unusable { 2 } else { 1 }
}

/// The request does not hold, and the printed output explains why.
#[derive(Debug)]
struct Said;

impl std::fmt::Display for Said {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("see above")
    }
}

impl std::error::Error for Said {}

/// The input cannot be used, so the command has no answer: exit code 2.
#[derive(Debug)]
struct Unusable;

impl std::fmt::Display for Unusable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("cannot be used")
    }
}

/// Without the outermost context.
fn cause_of(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Standard output takes no more.
#[derive(Debug)]
struct NotPrinted(std::io::Error);

impl NotPrinted {
    fn is_closed(&self) -> bool {
        self.0.kind() == std::io::ErrorKind::BrokenPipe
    }
}

impl std::fmt::Display for NotPrinted {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("standard output")
    }
}

impl std::error::Error for NotPrinted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

/// Print a line or a table on stdout. Others choose the names, paths and comments in it, so control characters are
/// escaped before they reach the terminal.
fn print_line(line: &str) -> Result<(), NotPrinted> {
    writeln!(std::io::stdout(), "{}", printable_lines(line)).map_err(NotPrinted)
}

/// Print one line on stderr, escaped as [`print_line`] does.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable(line));
}

/// Print help or a usage error. Clap colours the text, but does not escape arguments.
fn print_usage(error: &clap::Error, args: &[OsString]) {
    let is_plain = |arg: &OsString| arg.to_str().is_some_and(|text| text.chars().all(is_printable));
    let _ = if args.iter().all(is_plain) {
        error.print()
    } else {
        write!(std::io::stderr(), "{}", printable_lines(&error.render().to_string()))
    };
}

/// Print help unchanged, or the one line of a usage error that names option and value. Return the exit code.
fn print_in_a_line(error: &clap::Error) -> u8 {
    let text = error.render().to_string();
    if error.use_stderr() {
        say(text.lines().next().unwrap_or_default());
    } else {
        let _ = print_line(text.trim_end());
    }
    u8::try_from(error.exit_code()).unwrap_or(2)
}

/// Print a JSON line. JSON escapes control characters; the reading program handles the rest.
fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let text = serde_json::to_string(value)?;
    Ok(writeln!(std::io::stdout(), "{text}").map_err(NotPrinted)?)
}
